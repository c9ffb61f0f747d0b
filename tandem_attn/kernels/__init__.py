"""GPU kernels in Gluon, their compiler cache and launcher. Importing this package loads no Triton."""

"""Device code shared by the Hopper and Blackwell kernels."""

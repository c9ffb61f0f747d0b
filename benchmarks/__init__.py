"""Scripts around ``tandem bench`` (``tandem_attn.bench``): variants of the kernels, one launch for a profiler, host times; and results."""

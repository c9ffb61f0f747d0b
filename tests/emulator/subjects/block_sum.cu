// Sum of each block's 256 floats: shared-memory tree, then warp shuffles; the block totals are added atomically to the last output.
// y has gridDim.x + 1 elements; y[gridDim.x] must be zero at launch.
extern "C" __global__ void block_sum(const float *x, float *y, int n)
{
    __shared__ float partial[256];
    const int t = threadIdx.x;
    const int i = blockIdx.x * 256 + t;
    partial[t] = i < n ? x[i] : 0.0f;
    __syncthreads();
    for (int width = 128; width >= 32; width /= 2) {
        if (t < width)
            partial[t] += partial[t + width];
        __syncthreads();
    }
    if (t < 32) {
        float sum = partial[t];
        for (int offset = 16; offset > 0; offset /= 2)
            sum += __shfl_down_sync(0xffffffffu, sum, offset);
        if (t == 0) {
            y[blockIdx.x] = sum;
            atomicAdd(&y[gridDim.x], sum);
        }
    }
}

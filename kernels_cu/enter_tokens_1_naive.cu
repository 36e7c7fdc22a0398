// computes: token_ids[row] = the token that the step before has sampled as its number -1 - token_ids[row], where that
//           is no id but a placeholder, below 0; token 0 where that sample came from logits that are not finite
// arrays: token_ids [rows]; sampled [2, most]: tokens, and whether their logits were finite
// map: a thread owns a row
// new here: the first rung; the host need not read a token to feed it back
// limits: none
#include "device.h"

extern "C" __global__ void enter_tokens_1_naive(int* token_ids, const int* sampled, int rows, int most) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || token_ids[row] >= 0) return;
    int sample = -1 - token_ids[row];
    token_ids[row] = sampled[most + sample] ? sampled[sample] : 0;
}

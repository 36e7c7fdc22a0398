// computes: token_ids[row] = the row of this shard's embedding for a token: of its own, first to first + own - 1,
//           the token - first; of another shard's, own, the row of zeros behind them. An id below 0 is a placeholder:
//           the token is what the step before has sampled as its number -1 - id; 0 where that came from logits that are
//           not finite
// arrays: token_ids [rows]; sampled [2, most]: tokens, and whether their logits were finite
// map: a thread owns a row
// new here: the first rung; the host need not read a token to feed it back
// limits: none; a model that is not split owns all tokens
#include "device.h"

extern "C" __global__ void enter_tokens_1_naive(int* token_ids, const int* sampled, int rows, int most, int first,
                                                int own) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int token = token_ids[row];
    if (token < 0) token = sampled[most - 1 - token] ? sampled[-1 - token] : 0;
    token_ids[row] = token >= first && token < first + own ? token - first : own;
}

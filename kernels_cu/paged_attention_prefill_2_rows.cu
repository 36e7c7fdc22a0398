// computes: out[row] = softmax(q K^T / sqrt(head_dim)) V for many queries of a sequence, each over the tokens up to its
//           own
// arrays: out, q [rows, heads * head_dim]; pages [.., kv_heads * head_dim]; sequence_pages [slots, 2, positions]: pages
//         of keys, of values; tiles [tiles] of (first row, rows, sequence slot, visible tokens of the first row); 0
//         rows: nothing to do
// map: a block owns a tile and a head, ROWS of its rows and TOKENS tokens at a time; a thread scores, then columns of V
// new here: a key or value that was read serves ROWS rows before it is forgotten, through shared memory; a row's
//           weights are computed once instead of by every thread for every column
// limits: head_dim up to 256; above, the first rung serves
#include "device.h"
#include "attention.h"

constexpr int WARPS = 4, ROWS = 16, TOKENS = 32, COLUMNS = 2;  // of V that a thread owns

extern "C" __global__ void paged_attention_prefill_2_rows(Num* out, const Num* q, const Num* pages,
                                                          const int* sequence_pages, const int4* tiles, int tile_count,
                                                          int heads, int kv_heads, int head_dim, int positions,
                                                          int q_stride, int out_stride, int page_stride) {
    DYNAMIC_SHARED(float, q_rows);                          // [ROWS][pitch], pitch: head_dim and zeros
    int pitch = ceil_div(head_dim, NUMS16) * NUMS16 + 1;     // odd: neighbouring rows in different banks
    float *k_rows = q_rows + ROWS * pitch, *v_rows = k_rows + TOKENS * pitch;  // [TOKENS][pitch] each
    SHARED(float, weights, [ROWS][TOKENS + 1]);              // scores at first
    SHARED(float, rescale, [ROWS]);                         // what former sums are multiplied by; totals at the end
    int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int4 tile = tiles[blockIdx.y];
    const int* keys = sequence_pages + tile.z * 2LL * positions;
    const int* values = keys + positions;
    const Num* kv = pages + head / (heads / kv_heads) * head_dim;
    float scale = score_scale(head_dim);
    auto stage = [&](float* to, int i, const Num* from) {  // the i-th chunk of rows of `pitch` numbers
        float numbers[NUMS16];
        int row = i / (pitch / NUMS16), d = i % (pitch / NUMS16) * NUMS16;
        unpack(from ? load_head(from, d, head_dim) : uint4{0, 0, 0, 0}, numbers);
        for (int k = 0; k < NUMS16; k++) to[row * pitch + d + k] = numbers[k];
    };
    for (int top = 0; top < tile.y; top += ROWS) {
        int count = min(ROWS, tile.y - top), end = tile.w + top + count - 1;  // tokens that the last row sees
        const Num* q_head = q + (tile.x + top) * static_cast<long long>(q_stride) + head * head_dim;
        for (int i = threadIdx.x; i < ROWS * (pitch / NUMS16); i += blockDim.x) {
            int row = i / (pitch / NUMS16);
            stage(q_rows, i, row < count ? q_head + row * static_cast<long long>(q_stride) : nullptr);
        }
        float sums[COLUMNS][ROWS] = {}, largest[ROWS / WARPS], total[ROWS / WARPS];  // the latter of the warp's rows
        for (int i = 0; i < ROWS / WARPS; i++) largest[i] = NEGATIVE_INFINITY, total[i] = 0;
        for (int first = 0; first < end; first += TOKENS) {
            for (int i = threadIdx.x; i < TOKENS * (pitch / NUMS16); i += blockDim.x) {
                int token = first + i / (pitch / NUMS16);
                stage(k_rows, i, token < end ? page_at(kv, keys[token], page_stride) : nullptr);
                stage(v_rows, i, token < end ? page_at(kv, values[token], page_stride) : nullptr);
            }
            __syncthreads();  // q, keys and values are written before they are multiplied
#pragma unroll
            for (int i = 0; i < ROWS / WARPS; i++) {  // a lane scores a token
                int row = warp * (ROWS / WARPS) + i;
                float score = 0;
                for (int d = 0; d < head_dim; d++) score += q_rows[row * pitch + d] * k_rows[lane * pitch + d];
                score = first + lane < min(end, tile.w + top + row) ? score * scale : NEGATIVE_INFINITY;
                float before = largest[i];
                largest[i] = fmaxf(before, warp_max(score));
                weights[row][lane] = exp2_approx(score - largest[i]);
                float former = exp2_approx(before - largest[i]);
                total[i] = total[i] * former + warp_sum(weights[row][lane]);
                if (lane == 0) rescale[row] = former;
            }
            __syncthreads();  // weights are written before all threads use them
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                int d = threadIdx.x + c * 32 * WARPS;
                for (int row = 0; row < ROWS && d < head_dim; row++) {
                    float sum = sums[c][row] * rescale[row];
                    for (int t = 0; t < TOKENS; t++) sum += weights[row][t] * v_rows[t * pitch + d];
                    sums[c][row] = sum;
                }
            }
            __syncthreads();  // weights, keys and values are read before the next ones are written
        }
        for (int i = 0; i < ROWS / WARPS; i++)
            if (lane == 0) rescale[warp * (ROWS / WARPS) + i] = total[i];
        __syncthreads();  // totals are written before all threads divide by them
        for (int c = 0; c < COLUMNS; c++)
            for (int row = 0, d = threadIdx.x + c * 32 * WARPS; row < count && d < head_dim; row++)
                out[(tile.x + top + row) * static_cast<long long>(out_stride) + head * head_dim + d] =
                    to_num(sums[c][row] / rescale[row]);
        __syncthreads();  // totals are read before the next rows' take their place
    }
}

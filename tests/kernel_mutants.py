"""Faults planted in the kernels, one substitution each. The tests of the kernels must see every one of them.

The last rung of an operation has a mutant for each barrier and each bounds guard; every other rung has at least two.
The old text must occur once in the file. A kernel with a mutant that survives has a test that does not look.
"""

from __future__ import annotations

MUTANTS: dict[str, list[tuple[str, str]]] = {
    "lora_lookup_1_naive": [
        ("if (i >= layers * targets * entries) return;", ""),
        ("if (slot < 0) {", "if (slot < -1) {"),
        ("slot * table + b_start", "b_start"),
    ],
    "mbgmv_shrink_1_naive": [
        ("adapter.rank; j +=", "adapter.rank - 1; j +="),
        ("min(first + part, d_in)", "first + part"),
        ("+ i / width]", "]"),
    ],
    "mbgmv_expand_1_naive": [
        ("if (target == targets) return;", ""),
        ("o >= d_out[target]", "o > d_out[target]"),
        ("+ j * pieces +", "+ j +"),
    ],
    "mbgmm_shrink_1_naive": [
        ("tile.y * adapter.rank", "(tile.y - 1) * adapter.rank"),
        ("min(first + part, d_in)", "first + part"),
        ("(split * static_cast<long long>(rows) + row)", "row"),
    ],
    "mbgmm_expand_1_naive": [
        ("if (target == targets) return;", ""),
        ("row < tile.x + tile.y", "row <= tile.x + tile.y"),
    ],
    "mbgmv_shrink_2_warp": [
        ("if (j >= adapter.rank) return;", ""),
        ("sum = warp_sum(sum);", ""),
    ],
    "mbgmv_shrink_3_in_flight": [
        ("__syncthreads();  // x_part is written before all warps multiply with it", ""),
        ("__syncthreads();  // x_part is read before the next pass overwrites it", ""),
        ("x_part[32 * u + lane]", "x_part[32 * u + (lane ^ 1)]"),
    ],
    "mbgmv_expand_2_vector": [
        ("__syncthreads();  // t_row is written before all threads multiply with it", ""),
        ("t_row[j] = 0;", ""),
    ],
    "mbgmv_expand_3_in_flight": [
        ("__syncthreads();  // t_row is written before all threads multiply with it", ""),
        ("__syncthreads();  // the sums are written before the lower half adds them", ""),
        ("if (!active || group > 0) return;", "if (!active) return;"),
        ("bool active = at.count > 0,", "bool active = true,"),
    ],
    "mbgmm_shrink_2_rows": [
        ("if (lane == 0 && m < count)", "if (lane == 0)"),
        ("row < tile.y; row += ROWS", "row < ROWS; row += ROWS"),
    ],
    "mbgmm_shrink_3_tensor_cores": [
        ("__syncthreads();  // all warps' parts are written before they are added", ""),
        ("if (row + 8 < count && j < adapter.rank)", "if (j < adapter.rank)"),
        ("row = i % 32 / 4;", "row = i % 32 / 8;"),
    ],
    "mbgmm_shrink_4_staged": [
        ("if (stage >= 0 || stage == 1 - STAGES) __syncthreads();", ""),
        ("if (row < count && i < share && j + i * 8 < columns)", "if (i < share && j + i * 8 < columns)"),
        ("min(COLUMNS, adapter.rank - j0)", "COLUMNS"),
    ],
    "mbgmm_expand_2_rows": [
        ("if (m < count) *to", "*to"),
        ("if (target == targets || tile.y == 0) return;", ""),
    ],
    "mbgmm_expand_3_tensor_cores": [
        ("__syncthreads();  // t_tile and up are written before all warps read them", ""),
        ("if (row < count && of_y[r % 2].count)", "if (of_y[r % 2].count)"),
        ("pair_up(b[k]);", ";"),
    ],
    "mbgmm_expand_4_staged": [
        ("__syncthreads();  // t_tile and up are written before all warps read them", ""),
        ("__syncthreads();  // this stage's copies have landed; the former one's place, or t_tile's, is read", ""),
        ("__syncwarp();  // the warp's part of y is complete before its lanes write it out, 16 bytes each", ""),
        ("__syncthreads();  // the ring is read before the next product fills it", ""),
        ("if (row < count && c < chunks)", "if (c < chunks)"),
        ("min(my_row + k * STEP, ranks - 1)", "min(my_row + k * STEP, 0)"),
    ],
    "paged_attention_decode_1_naive": [
        ("__syncthreads();  // scores are written before any thread reads them", ""),
        ("__syncthreads();  // scores are read before the next ones are written", ""),
        ("min(begin + chunk, query.y)", "begin + chunk"),
        ("query.x < 0 ||", ""),
        ("if (token < end) {", "{"),
        ("min(blockDim.x, end - first)", "blockDim.x"),
        ("head / (heads / kv_heads)", "head % kv_heads"),
        ("total *= rescale;", ""),
        ("sums[d] * rescale", "sums[d]"),
        ("total == 0 ? 0.0f : sums[d] / total", "sums[d] / total"),
        ("if (splits > 1 && threadIdx.x == 0)", "if (splits > 1 && threadIdx.x == 1 && split == 0)"),
    ],
    "paged_attention_merge_1_naive": [
        ("if (query.x < 0) return;", ""),
        ("min(ceil_div(query.y, chunk), splits)", "splits"),
        ("total += weight *", "total +="),
        ("total == 0 ? 0.0f : sum / total", "sum / total"),
        ("d < head_dim; d += blockDim.x", "d < head_dim; d += head_dim"),
    ],
    "paged_attention_prefill_1_naive": [
        ("__syncthreads();  // scores are written before any thread reads them", ""),
        ("__syncthreads();  // scores are read before the next ones are written", ""),
        ("visible = tile.w + i", "visible = tile.w"),
        ("i < tile.y", "i <= tile.y"),
        ("if (token < visible) {", "{"),
        ("min(blockDim.x, visible - first)", "blockDim.x"),
        ("head / (heads / kv_heads)", "head % kv_heads"),
        ("total *= rescale;", ""),
        ("sums[d] * rescale", "sums[d]"),
    ],
    "rope_store_1_naive": [
        ("if (head >= heads && k_page < 0) continue;", ""),
        ("v_page >= 0 &&", ""),
        ("low * c - high * s", "low * c + high * s"),
        ("pair < (heads + kv_heads) * half", "pair < heads * half"),
        ("q + (heads + kv_heads) * head_dim", "q + heads * head_dim"),
    ],
    "rms_norm_1_naive": [
        ("__syncthreads();  // each thread's squares are written before all threads add them", ""),
        ("i < hidden; i += blockDim.x) {", "i <= hidden; i += blockDim.x) {"),
        ("if (delta) from[i]", "from[i]"),
        ("total / hidden + eps", "total / hidden"),
        ("row * delta_stride", "row * x_stride"),
    ],
    "silu_mul_1_naive": [
        ("if (i >= ffn) return;", ""),
        ("+ ffn + i]", "+ i]"),
    ],
    "load_pages_1_naive": [
        ("i < all;", "i <= all;"),
        ("page * static_cast<long long>(page_stride)", "page * static_cast<long long>(width)"),
        ("vector * image_stride", "vector * width"),
        ("layer * layer_stride", "0"),
    ],
    "argmax_1_naive": [
        ("__syncthreads();  // each thread's findings are written before thread 0 compares them", ""),
        ("if (threadIdx.x > 0) return;", ""),
        ("i < vocab;", "i <= vocab;"),
        ("|| (bests[i] == best && tokens[i] < at)", ""),
        ("logit > best", "logit >= best"),
        ("good = good && all_finite[i];", ""),
    ],
    "rms_norm_2_vector": [
        ("__syncthreads();  // each warp's squares are written before all threads add them", ""),
        ("(x_stride | delta_stride | out_stride)", "(x_stride | out_stride)"),
        ("if (whole && count == NUMS16) return unpack(load16(p), n);", "if (whole) return unpack(load16(p), n);"),
        ("if (whole && count == NUMS16) return store16(p, pack(n));", "if (whole) return store16(p, pack(n));"),
        ("k < count ? to_float(p[k]) : 0.0f", "to_float(p[k])"),
        ("for (int k = 0; k < count; k++) p[k]", "for (int k = 0; k < NUMS16; k++) p[k]"),
        ("if (threadIdx.x % 32 == 0) squares", "if (threadIdx.x % 32 == 1 && threadIdx.x > 32) squares"),
        ("to_float(to_num(a[k] + b[k]))", "a[k]"),
    ],
    "silu_mul_2_vector": [
        ("i < ffn; i += step", "i < ffn + NUMS16; i += step"),
        ("(ffn | out_stride | gate_up_stride)", "(ffn | gate_up_stride)"),
        ("min(i + NUMS16, ffn)", "i + NUMS16"),
        ("*up = gate + ffn", "*up = gate"),
    ],
    "load_pages_2_vector": [
        ("(image_stride | page_stride) % NUMS16", "page_stride % 1"),
        ("|| i >= all ||", "||"),
        ("if (i >= all) break;", ""),
        ("if (whole && column + NUMS16 <= width) store16", "if (whole) store16"),
        ("min(NUMS16, width - column)", "NUMS16"),
        ("page * page_stride", "page * width"),
    ],
    "argmax_2_vector": [
        ("__syncthreads();  // each warp's findings are written before thread 0 compares them", ""),
        ("if (threadIdx.x > 0) return;", ""),
        ("logits_stride % NUMS16 == 0", "true"),
        ("k < count ? to_float(from[i + k]) : 0.0f", "to_float(from[i + k])"),
        ("if (k < count) compare", "compare"),
        ("(logit == best && i < at)", "logit == best"),
        ("good &= all_finite[i];", ""),
        ("good &= __shfl_xor_sync(~0u, good, lanes);", ""),
    ],
}

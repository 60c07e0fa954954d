// The transposed copy of codes: math.md, section 10. A block processes tiles of 128 rows and 128
// columns one after the other. The last tile comes first: its codes were written last and are still
// in the L2 (16384x4096 with the norm: 90 us, first tile first 92 us).
//
// A tile is stored in shared memory as words of four columns. Each row is rotated so that accesses
// along rows and down columns have no bank conflicts.

constexpr int SIDE = 128, WORDS = SIDE / 4, STRIP = 16;
static_assert(THREADS == SIDE / STRIP * WORDS, "a thread has 16 rows of 4 columns");

// The place of a word of a tile's row.
__device__ inline int place(int row, int word) { return row * WORDS + (word ^ (row / STRIP * 4)); }

// Gathers one byte of each of four words into a word; the first word's byte is the lowest.
__device__ inline unsigned gather(const unsigned* words, int byte) {
    const unsigned low = __byte_perm(words[0], words[1], byte | (4 + byte) << 4);
    const unsigned high = __byte_perm(words[2], words[3], byte | (4 + byte) << 4);
    return __byte_perm(low, high, 0x5410);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) transpose_codes(const __grid_constant__ Params p) {
    __shared__ __align__(16) unsigned tile[SIDE * WORDS];
    const unsigned long long across = (p.cols + SIDE - 1) / SIDE, tiles = (p.rows + SIDE - 1) / SIDE * across;
    // Whether every row of both matrices begins on 16 bytes.
    unsigned long long bytes = (unsigned long long)p.codes.data | p.codes.row_stride | (unsigned long long)p.codes_t.data | p.codes_t.row_stride;
#if HAS_ROW_GROUPS
    bytes |= p.codes.group_stride;
#endif
    if constexpr (HAS_COLUMN_GROUPS) bytes |= p.cols;
    const bool is_wide = bytes % STRIP == 0;
    wait_for_earlier_kernels();

    for (unsigned long long turn = blockIdx.x; turn < tiles; turn += gridDim.x) {
        const unsigned long long number = tiles - 1 - turn;
        const unsigned long long row0 = number / across * SIDE, col0 = number % across * SIDE;
        const int rows = int(min(p.rows - row0, (unsigned long long)SIDE)), cols = int(min(p.cols - col0, (unsigned long long)SIDE));
        // Eight threads read a row of the tile.
        constexpr int THREADS_OF_ROW = SIDE / STRIP;
        const int strip = threadIdx.x % THREADS_OF_ROW * STRIP;
        #pragma unroll
        for (int r = threadIdx.x / THREADS_OF_ROW; r < SIDE; r += THREADS / THREADS_OF_ROW) {
            unsigned words[4] = {};
            if (r < rows) {
                const Code* from = ROW(codes, row0 + r) + col0 + strip;
                if (is_wide && strip + STRIP <= cols) {
                    load<16, Hint::EvictFirst>(from, words);
                } else {
                    for (int i = 0; i < STRIP && strip + i < cols; ++i) words[i / 4] |= unsigned(from[i].bits) << (8 * (i % 4));
                }
            }
            *reinterpret_cast<uint4*>(&tile[place(r, strip / 4)]) = make_uint4(words[0], words[1], words[2], words[3]);
        }
        __syncthreads();
        const int first = threadIdx.x % THREADS_OF_ROW * STRIP, word = threadIdx.x / THREADS_OF_ROW;
        unsigned strips[STRIP];
        #pragma unroll
        for (int i = 0; i < STRIP; ++i) strips[i] = tile[place(first + i, word)];
        #pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const int col = word * 4 + byte;
            if (col >= cols) break;
            unsigned words[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = gather(&strips[4 * i], byte);
            Code* to = p.codes_t.data + (group_column(p) + col0 + col) * p.codes_t.row_stride + row0 + first;
            if (is_wide && first + STRIP <= rows) {
                store<16, true>(to, words);
            } else {
                #pragma unroll
                for (int i = 0; i < STRIP; ++i)
                    if (first + i < rows) store_byte(to + i, words[i / 4] >> (8 * (i % 4)));
            }
        }
        __syncthreads();
    }
}

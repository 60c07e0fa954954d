// Strips of a transposed copy of codes: math.md, section 10. A strip is STRIP rows of a column. A thread
// gathers the strips of four columns. It reads words that have the codes of these columns, one for each row.

constexpr int STRIP = 16;

// Gathers one byte of each of four words into a word; the first word's byte is the lowest.
__device__ inline unsigned gather(const unsigned* words, int byte) {
    const unsigned low = __byte_perm(words[0], words[1], byte | (4 + byte) << 4);
    const unsigned high = __byte_perm(words[2], words[3], byte | (4 + byte) << 4);
    return __byte_perm(low, high, 0x5410);
}

// The strip of column `byte` of the four.
__device__ inline void gather_strip(const unsigned (&rows)[STRIP], int byte, unsigned (&strip)[STRIP / 4]) {
    #pragma unroll
    for (int i = 0; i < STRIP / 4; ++i) strip[i] = gather(&rows[4 * i], byte);
}

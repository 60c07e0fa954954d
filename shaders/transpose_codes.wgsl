// The transposed copy of codes: math.md, section 10. A workgroup has a tile of SIDE rows and SIDE
// columns.
//
// The tile is stored in workgroup memory as words of four columns. The words are permuted
// differently every four rows, so that neither row accesses nor column accesses have bank
// conflicts.

const SIDE = 64u;
const WORDS = 16u;

var<workgroup> tile: array<u32, SIDE * WORDS>;

fn place(row: u32, word: u32) -> u32 { return row * WORDS + (word ^ (row / 4u)); }

// One byte of each of four words; the first word's byte is the lowest.
fn gather(words: vec4<u32>, byte: u32) -> u32 {
    let bytes = (words >> vec4(8u * byte)) & vec4(0xffu);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let across = (params.cols + SIDE - 1u) / SIDE;
    let first_row = work_of(work) / across * SIDE;
    let first_col = work_of(work) % across * SIDE;
    for (var i = lane_of(me); i < SIDE * WORDS; i += WORKGROUP) {
        let row = first_row + i / WORDS;
        let col = first_col + i % WORDS * 4u;
        var word = 0u;
        if (row < params.rows && col < params.cols) { word = load_codes(row, col); }
        tile[place(i / WORDS, i % WORDS)] = word;
    }
    workgroupBarrier();
    // Sixteen threads have four columns of all rows.
    for (var i = lane_of(me); i < WORDS * WORDS; i += WORKGROUP) {
        let quad = i % WORDS * 4u;
        let word = i / WORDS;
        let row = first_row + quad;
        if (row >= params.rows) { continue; }
        let words = vec4(
            tile[place(quad, word)], tile[place(quad + 1u, word)],
            tile[place(quad + 2u, word)], tile[place(quad + 3u, word)],
        );
        for (var byte = 0u; byte < 4u; byte += 1u) {
            let col = first_col + word * 4u + byte;
            if (col < params.cols) { store_codes_t(row, col, gather(words, byte)); }
        }
    }
}

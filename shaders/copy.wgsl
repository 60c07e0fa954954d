// Copies x to y, to measure memory bandwidth. One row, PACKS pairs per thread.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let thread = lane_of(me);
    let first = work_of(work) * PACKS;
    @unroll(K) {
        let kept_K = load_x(0u, thread, first + K);
    }
    @unroll(K) {
        store_y(0u, thread, first + K, kept_K);
    }
}

// The second phase of dweight and dbias: adds the partial rows in a fixed order and stores the sum.
//
// THREADS_PER_ROW threads own a quad each. Groups of such threads divide the partial rows and
// combine their sums in workgroup memory.

var<workgroup> folded: array<vec4<f32>, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let lane = lane_of(me);
    let tiles = (params.cols + QUAD * THREADS_PER_ROW - 1u) / (QUAD * THREADS_PER_ROW);
    let gradient = work_of(work) / tiles;
    let col = (work_of(work) % tiles * THREADS_PER_ROW + lane % THREADS_PER_ROW) * QUAD;
    let groups = WORKGROUP / THREADS_PER_ROW;
    let stride = partial_stride();
    var sum = vec4(0.0);
    if (col < params.cols && gradient < GRADIENTS) {
        let first = gradient * params.partial_rows;
        for (var row = lane / THREADS_PER_ROW; row < params.partial_rows; row += groups) {
            sum += workspace[(PARTIALS + (first + row) * stride + col) >> 2u];
        }
    }
    for (var half = groups / 2u; half > 0u; half /= 2u) {
        folded[lane] = sum;
        workgroupBarrier();
        if (lane < half * THREADS_PER_ROW) { sum += folded[lane + half * THREADS_PER_ROW]; }
        workgroupBarrier();
    }
    if (lane >= THREADS_PER_ROW) { return; }
    store_gradient(gradient, col, sum);
}

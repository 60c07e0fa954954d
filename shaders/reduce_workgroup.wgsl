// Sums over the threads of a row through workgroup memory, in an order that depends only on the
// tile: the threads of a segment first, then the segments.

var<workgroup> exchange: array<Sum, WORKGROUP>;
var<workgroup> segments: array<Sum, WORKGROUP / SEGMENT>;

// Every thread of the workgroup must call this; each gets the sum of its row. A barrier separates
// the last read of each array from the first write for the next sum.
fn sum_threads(value: Sum, lane: u32) -> Sum {
    if (THREADS_PER_ROW == 1u) { return value; }
    exchange[lane] = value;
    workgroupBarrier();
    let first = lane / SEGMENT * SEGMENT;
    var sum = exchange[first];
    for (var i = 1u; i < SEGMENT; i += 1u) { sum += exchange[first + i]; }
    if (THREADS_PER_ROW > SEGMENT && lane == first) { segments[lane / SEGMENT] = sum; }
    workgroupBarrier();
    if (THREADS_PER_ROW > SEGMENT) {
        let of_row = lane / THREADS_PER_ROW * (THREADS_PER_ROW / SEGMENT);
        sum = segments[of_row];
        for (var i = 1u; i < THREADS_PER_ROW / SEGMENT; i += 1u) { sum += segments[of_row + i]; }
    }
    return sum;
}

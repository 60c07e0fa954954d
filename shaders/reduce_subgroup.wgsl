// Sums over the threads of a row, in an order that depends on the tile alone: lanes of a subgroup by shuffles,
// subgroups through workgroup memory.

var<workgroup> exchange: array<Sum, 2u * SUBGROUPS>;
var<private> turn: u32 = 0u;

// Every thread of the workgroup must come here; each gets the sum of its row. One barrier a sum: two halves of the
// exchange alternate, so that nobody overwrites what another still reads.
fn sum_threads(value: Sum, lane: u32) -> Sum {
    var sum = value;
    for (var distance = min(THREADS_PER_ROW, SUBGROUP) / 2u; distance > 0u; distance /= 2u) {
        sum += subgroupShuffleXor(sum, distance);
    }
    if (THREADS_PER_ROW > SUBGROUP) {
        let half = turn * SUBGROUPS;
        turn ^= 1u;
        if (lane % SUBGROUP == 0u) { exchange[half + lane / SUBGROUP] = sum; }
        workgroupBarrier();
        let senders = THREADS_PER_ROW / SUBGROUP;
        let of_row = half + lane / THREADS_PER_ROW * senders;
        if (!IS_SHUFFLED_TWICE) {
            sum = exchange[of_row];
            for (var i = 1u; i < senders; i += 1u) { sum += exchange[of_row + i]; }
            return sum;
        }
        // Of a power of two, those beyond the senders are zeros.
        let half_of_all = 1u << firstLeadingBit(senders - 1u);
        let sender = lane % (2u * half_of_all);
        sum = select(Sum(), exchange[of_row + min(sender, senders - 1u)], sender < senders);
        for (var distance = half_of_all; distance > 0u; distance /= 2u) { sum += subgroupShuffleXor(sum, distance); }
    }
    return sum;
}

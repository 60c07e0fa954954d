// Sums over the threads of a row, in an order that depends only on the tile: shuffles within a
// subgroup, then workgroup memory across subgroups.

struct Me {
    @builtin(subgroup_invocation_id) in_subgroup: u32,
    @builtin(subgroup_id) subgroup: u32,
}

// WGSL does not guarantee that subgroups follow the local index. Subgroups should be full; if one is
// not, results are wrong, but no index is out of bounds.
fn lane_of(me: Me) -> u32 { return min(me.subgroup * SUBGROUP + me.in_subgroup, WORKGROUP - 1u); }

fn shuffled(value: u32, distance: u32) -> u32 { return subgroupShuffleXor(value, distance); }

var<workgroup> exchange: array<Sum, 2u * SUBGROUPS>;
var<private> turn: u32 = 0u;

// Every thread of the workgroup must call this; each gets the sum of its row. One barrier per sum:
// calls alternate between the halves of `exchange`, so that no thread overwrites a value that
// another still reads.
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
        // The lanes are a power of two; lanes without a sender add zeros.
        let half_of_all = 1u << firstLeadingBit(senders - 1u);
        let sender = lane % (2u * half_of_all);
        sum = select(Sum(), exchange[of_row + min(sender, senders - 1u)], sender < senders);
        for (var distance = half_of_all; distance > 0u; distance /= 2u) { sum += subgroupShuffleXor(sum, distance); }
    }
    return sum;
}

// The position of a thread in its workgroup, in programs that use no subgroups.

struct Me {
    @builtin(local_invocation_index) index: u32,
}

fn lane_of(me: Me) -> u32 { return me.index; }

// Never called.
fn shuffled(value: u32, distance: u32) -> u32 { return value; }

// The position of a thread, in programs that use no subgroups.

struct Me {
    @builtin(local_invocation_index) index: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
}

fn lane_of(me: Me) -> u32 { return me.index; }

// Never called.
fn shuffled(value: u32, distance: u32) -> u32 { return value; }

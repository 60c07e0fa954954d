// Where a thread is.

struct Me {
    // if IS_SUBGROUP
    @builtin(subgroup_invocation_id) in_subgroup: u32,
    @builtin(subgroup_id) subgroup: u32,
    // else
    @builtin(local_invocation_index) index: u32,
    // end
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
}

// The thread's number in its workgroup.
fn lane_of(me: Me) -> u32 {
    // if IS_SUBGROUP
    // Nothing promises that subgroups follow the local index. They should be full; where one is not, numbers are wrong, and
    // no index is out of bounds.
    return min(me.subgroup * SUBGROUP + me.in_subgroup, WORKGROUP - 1u);
    // else
    return me.index;
    // end
}

// The workgroup's number: more workgroups than one dimension holds are folded into two.
fn work_of(me: Me) -> u32 { return me.group.y * me.grid.x + me.group.x; }

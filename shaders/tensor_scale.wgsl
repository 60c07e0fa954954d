// Replaces the amax of a tensor with its scale: math.md, equations (Q3) and (Q4).

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    if (work_of(work) + lane_of(me) > 0u) { return; }
    scales[params.scales] = bitcast<u32>(scale_of(scales[params.scales]).value);
}

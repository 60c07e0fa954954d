// Zeroes a tensor, into which the next program folds, or in which it leaves gaps. A pass, unlike an encoder, has nothing for it.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me) {
    let byte = (work_of(me) * WORKGROUP + lane_of(me)) * 4u;
    if (byte < params.cols) { clear(byte); }
}

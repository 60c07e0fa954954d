// Zeroes a tensor before a program that takes maxima in it or leaves gaps. A compute pass, unlike
// an encoder, has no command for this.

@compute @workgroup_size(WORKGROUP)
fn main(me: Me, work: Work) {
    let byte = (work_of(work) * WORKGROUP + lane_of(me)) * 4u;
    if (byte < params.cols) { clear(byte); }
}

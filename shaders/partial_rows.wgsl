// Where partial sums of dweight and dbias lie: rows of the first gradient that is asked for, then rows of the second.

// One or two; dbias is the last.
override GRADIENTS: u32;

fn partial_stride() -> u32 { return (params.cols + (PADDING - 1u)) / PADDING * PADDING; }

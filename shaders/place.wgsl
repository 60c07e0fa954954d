// Where an element of TENSOR lies in its binding.
fn at_TENSOR(row: u32, col: u32) -> u32 {
    // if IS_GROUPED
    let there = row + params.first_in_group;
    let group = there / params.rows_per_group;
    let row_of_group = there - group * params.rows_per_group;
    return params.TENSOR.x + group * params.TENSOR_group_stride + row_of_group * params.TENSOR.y + col;
    // else
    return params.TENSOR.x + row * params.TENSOR.y + col;
    // end
}

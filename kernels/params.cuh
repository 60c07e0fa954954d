// Tensors in the argument of a kernel. `struct Params p`, the argument itself, follows this file:
// rmsnorm-cuda/src/params.rs prints it with the tensors and numbers of the kernel's call.
//
// T: activations; W: weight and bias; R: residual stream; G: gradients of weight and bias. Absent
// tensors are null.

template <class E>
struct Matrix {
    E* data;
    unsigned long long row_stride; // elements
#if HAS_ROW_GROUPS
    unsigned long long group_stride; // elements
#endif
};

// ROW(matrix, index): the address of the first element of a row, in p's matrix of that name. With
// groups of columns, the row ends with the group of the block (at.cuh).

#if HAS_ROW_GROUPS
// The group of a row. Without a division: the product with `reciprocal`, which is
// 2^64 / rows_per_group rounded up, is the exact quotient of 32-bit numbers (D. Lemire, O. Kaser,
// N. Kurz: Faster remainder by direct computation, 2019, theorem 1). The host rejects more rows.
__device__ inline unsigned group_of(unsigned long long reciprocal, unsigned row) {
    const unsigned low = reciprocal, high = reciprocal >> 32;
    return ((unsigned long long)high * row + __umulhi(low, row)) >> 32;
}

// Elements from row 0 to `row`.
template <class E>
__device__ inline unsigned long long row_start(
    const Matrix<E>& matrix, unsigned rows_per_group, unsigned long long reciprocal, unsigned row) {
    const unsigned group = group_of(reciprocal, row);
    return group * matrix.group_stride + (row - group * rows_per_group) * matrix.row_stride;
}
#define ROW(matrix, index) (p.matrix.data + row_start(p.matrix, p.rows_per_group, p.group_reciprocal, index) + group_column(p))
#else
#define ROW(matrix, index) (p.matrix.data + (index) * p.matrix.row_stride + group_column(p))
#endif

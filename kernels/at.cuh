// With groups of columns, p.cols are the columns of a group. HAS_COLUMN_GROUPS: blocks of blockIdx.y
// have one group, as if it were the whole row. GROUPS_ARE_ROWS: every group is a row of its own, and
// the groups of a row are one group of rows. So adjacent groups are read together.

// The group's first column, in matrices, weight, bias and their gradients.
__device__ inline unsigned long long group_column(const Params& p) { return HAS_COLUMN_GROUPS ? blockIdx.y * p.cols : 0; }

// The first column of a row's group in weight and bias, less `group_column`.
__device__ inline unsigned long long row_column(const Params& p, unsigned long long row) {
#if GROUPS_ARE_ROWS
    return (row - group_of(p.group_reciprocal, row) * p.rows_per_group) * p.cols;
#else
    return 0;
#endif
}

// The row of a matrix in which a row's group is.
__device__ inline unsigned long long matrix_row(const Params& p, unsigned long long row) {
#if GROUPS_ARE_ROWS
    return group_of(p.group_reciprocal, row);
#else
    return row;
#endif
}

// The index of the group's mean and rstd.
__device__ inline unsigned long long statistic(unsigned long long row) {
    return HAS_COLUMN_GROUPS ? row * gridDim.y + blockIdx.y : row;
}

// The group's first element in workspace, locks and row_sums.
__device__ inline unsigned long long group_workspace(const Params& p) {
    return HAS_COLUMN_GROUPS ? blockIdx.y * p.workspace_of_group : 0;
}

// A thread's place in a row: its first column, and the columns from there to the end of the row.
struct At {
    const Params& p;
    unsigned long long row, first;
    int left;
};

// The address of that column in a matrix, for the `At` that is named `at`: in pieces. In a schedule
// `at(u)` makes the `At` of row u. ROW needs a `p`, which the lambda has.
#define AT(matrix) [&](const Params& p) { return ROW(matrix, at.row) + at.first; }(at.p)

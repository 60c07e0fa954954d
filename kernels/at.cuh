// A thread's place in a row: its first column, and the columns from there to the end of the row.
struct At {
    const Params& p;
    unsigned long long row, first;
    int left;
};

// The address of that column in a matrix, for the `At` that is named `at`: in pieces. In a schedule
// `at(u)` makes the `At` of row u. ROW needs a `p`, which the lambda has.
#define AT(matrix) [&](const Params& p) { return ROW(matrix, at.row) + at.first; }(at.p)

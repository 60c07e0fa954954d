// The argument of every kernel: the mirror of rmsnorm-cuda/src/params.rs, field for field.

template <class E>
struct Matrix {
    E* data;
    unsigned long long row_stride; // elements

    __device__ E* row(unsigned long long index) const { return data + index * row_stride; }
};

// T: activations; W: weight and bias; R: residual stream. Absent tensors are null.
struct Params {
#if IS_BACKWARD
    Matrix<const R> x; // what was normalized
#else
    Matrix<const T> x;
#endif
    Matrix<const R> residual;
    Matrix<const T> dy;
    Matrix<const R> dresidual_out;
    Matrix<T> y;
    Matrix<R> residual_out;
    Matrix<T> dx;
    const W* weight;
    const W* bias;
    float* mean;
    float* rstd;
    W* dweight;
    W* dbias;
    float* partials;
    unsigned* locks;
    float* row_sums;
    unsigned long long rows;
    unsigned long long cols;
    unsigned long long chunks;
    unsigned long long partial_rows;
    float eps;
    float weight_offset;
    float share; // 1 / cols
    unsigned unused;
    Matrix<R> dresidual;
};

static_assert(sizeof(Params) == PARAMS_BYTES, "kernels/params.cuh and rmsnorm-cuda/src/params.rs differ");

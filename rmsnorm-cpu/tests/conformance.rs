//! The conformance suite on every instruction set, on two threads, because splitting the rows must
//! not change results.

use rmsnorm_cpu::{CpuBackend, Isa};

mod portable {
    rmsnorm_conformance::conformance!(super::CpuBackend::with(super::Isa::Portable, 2));
}

mod avx2 {
    rmsnorm_conformance::conformance!(super::CpuBackend::with(super::Isa::Avx2, 2));
}

mod avx512 {
    rmsnorm_conformance::conformance!(super::CpuBackend::with(super::Isa::Avx512, 2));
}

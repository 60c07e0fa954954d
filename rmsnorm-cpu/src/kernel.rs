//! The stage bodies. Each is compiled once per instruction set; the bodies of common calls also
//! once per dtype of activations and residual stream. Only this module selects a body.
//!
//! They are compiled in this crate, so that they are fast in a caller's debug build: the functions
//! that callers use are not generic.

use std::marker::PhantomData;

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::{DType, DTypes, bf16, f16};

use crate::caps::Isa;
use crate::lanes::{Any, Mix, Portable, Simd, Work};
#[cfg(target_arch = "x86_64")]
use crate::lanes::{Avx2, Avx512};
use crate::stages::{Common, Stage};

/// A stage in the body of a mix.
struct OfMix<'w, W, M> {
    work: &'w mut W,
    mix: PhantomData<M>,
}

impl<W: Stage, M: Mix> Work for OfMix<'_, W, M> {
    type Output<S: Simd> = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        self.work.run::<S, M>();
    }
}

/// Runs a stage in the body of a mix: `P` with the instructions that the target guarantees, `M` with others. Inlined,
/// because a call of one row takes 10 % more time otherwise.
#[inline(always)]
fn run<M: Mix, P: Mix>(isa: Isa, work: &mut impl Stage) {
    let _ieee = IeeeMode::enter();
    // SAFETY:
    // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
    unsafe {
        match isa {
            Isa::Portable => Portable::call(OfMix { work, mix: PhantomData::<P> }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::call(OfMix { work, mix: PhantomData::<M> }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::call(OfMix { work, mix: PhantomData::<M> }),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => Portable::call(OfMix { work, mix: PhantomData::<P> }),
        }
    }
}

/// The body for all dtypes.
type Every = (Any, Any, Any);

/// Runs a stage in its body for all dtypes.
pub(crate) fn any<W: Stage>(isa: Isa, work: &mut W) {
    run::<Every, Every>(isa, work);
}

/// The portable body of a mix: that for all dtypes where there are other instruction sets.
#[cfg(target_arch = "x86_64")]
macro_rules! portable_of {
    ($mix:ty) => {
        Every
    };
}
#[cfg(not(target_arch = "x86_64"))]
macro_rules! portable_of {
    ($mix:ty) => {
        $mix
    };
}

/// Runs a stage in a body for the dtypes of activations and residual stream. The weight's dtype is
/// tested at run time, which takes no measurable time.
pub(crate) fn mix<W: Common>(isa: Isa, work: &mut W) {
    macro_rules! run_mix {
        ($mix:ty) => {
            run::<$mix, portable_of!($mix)>(isa, work)
        };
    }
    let DTypes { activation, residual, .. } = work.dtypes();
    match (activation, residual) {
        // With a residual stream of 16 bits y is wider than x, and such calls run in `any`.
        (DType::F32, _) => run_mix!((f32, f32, f32)),
        (DType::F16, DType::F32) => run_mix!((f16, Any, f32)),
        (DType::F16, _) => run_mix!((f16, Any, f16)),
        (DType::Bf16, DType::F32) => run_mix!((bf16, Any, f32)),
        (DType::Bf16, _) => run_mix!((bf16, Any, bf16)),
    }
}

/// The scale of a tensor, in the floating-point mode of the stages.
#[inline(never)]
pub(crate) fn scale(quant: &QuantSpec, amax: f32) -> f32 {
    let _ieee = IeeeMode::enter();
    std::hint::black_box(quant).scale(std::hint::black_box(amax))
}

/// Sets rounding to nearest and gradual underflow until it is dropped. Audio and game code flushes
/// subnormals on its threads, and results must not depend on the thread.
struct IeeeMode {
    #[cfg(target_arch = "x86_64")]
    caller: u32,
}

#[cfg(target_arch = "x86_64")]
impl IeeeMode {
    /// All exceptions masked, round to nearest, no flush to zero, no denormals as zero.
    const DEFAULT: u32 = 0x1f80;

    fn enter() -> Self {
        let mut caller = 0;
        // SAFETY:
        // - features: stmxcsr and ldmxcsr are part of SSE, which x86-64 guarantees;
        // - memory: each accesses the one u32 it is given;
        // - state: DEFAULT is the floating-point environment that Rust assumes.
        unsafe {
            // Without `readonly` and `preserves_flags`: arithmetic must not move across the change of mode.
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut caller, options(nostack));
            std::arch::asm!("ldmxcsr [{}]", in(reg) &Self::DEFAULT, options(nostack));
        }
        IeeeMode { caller }
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for IeeeMode {
    fn drop(&mut self) {
        // SAFETY:
        // - features: ldmxcsr is part of SSE, which x86-64 guarantees;
        // - memory: it reads the one u32 it is given;
        // - state: the value is the one that `enter` found.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &self.caller, options(nostack));
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl IeeeMode {
    fn enter() -> Self {
        IeeeMode {}
    }
}

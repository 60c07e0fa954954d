//! The stage bodies. Each is compiled once per instruction set; the bodies of common calls also
//! once per dtype of activations and residual stream. Only this module selects a body.
//!
//! They are compiled in this crate, so that they are fast in a caller's debug build: the functions
//! that callers use are not generic.

use rmsnorm_spec::quant::QuantSpec;
use rmsnorm_spec::{DType, DTypes, bf16, f16};

use crate::caps::Isa;
use crate::lanes::{Any, Mix};
use crate::stages::{Common, Stage};

/// An instruction set with a body per dtype for the common stages.
#[derive(Clone, Copy)]
enum Wide {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The instructions of the target, on architectures without another set here.
    #[cfg(not(target_arch = "x86_64"))]
    Target,
}

impl Wide {
    fn of(isa: Isa) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        match isa {
            Isa::Portable => None,
            Isa::Avx2 => Some(Wide::Avx2),
            Isa::Avx512 => Some(Wide::Avx512),
        }
        #[cfg(not(target_arch = "x86_64"))]
        match isa {
            Isa::Portable | Isa::Avx2 | Isa::Avx512 => Some(Wide::Target),
        }
    }

    /// Runs a stage in the body of a mix.
    fn run<M: Mix>(self, work: &mut impl Stage) {
        let _ieee = IeeeMode::enter();
        match self {
            #[cfg(target_arch = "x86_64")]
            Wide::Avx2 => {
                // SAFETY:
                // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
                unsafe { avx2::run::<_, M>(work) }
            }
            #[cfg(target_arch = "x86_64")]
            Wide::Avx512 => {
                // SAFETY:
                // - feature: a backend holds an `Isa` only if `Isa::is_available` said yes.
                unsafe { avx512::run::<_, M>(work) }
            }
            #[cfg(not(target_arch = "x86_64"))]
            Wide::Target => portable::run::<_, M>(work),
        }
    }
}

/// A module per instruction set, so that they are compiled in parallel.
macro_rules! bodies {
    ($module:ident, $lanes:ident, [$($unsafe:tt)*], $(#[$attribute:meta])*) => {
        mod $module {
            use crate::lanes::{$lanes, Mix};
            use crate::stages::Stage;

            $(#[$attribute])*
            pub(super) $($unsafe)* fn run<W: Stage, M: Mix>(work: &mut W) {
                work.run::<$lanes, M>();
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
bodies!(avx2, Avx2, [unsafe], #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
bodies!(avx512, Avx512, [unsafe], #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]);
bodies!(portable, Portable, [],);

/// Runs a stage with the instructions that the target guarantees.
fn run_portable<M: Mix>(work: &mut impl Stage) {
    let _ieee = IeeeMode::enter();
    portable::run::<_, M>(work);
}

/// Runs a stage in its body for all dtypes.
pub(crate) fn any<W: Stage>(isa: Isa, work: &mut W) {
    match Wide::of(isa) {
        Some(wide) => wide.run::<(Any, Any, Any)>(work),
        None => run_portable::<(Any, Any, Any)>(work),
    }
}

/// Runs a stage in a body for the dtypes of activations and residual stream. The weight's dtype is
/// tested at run time, which takes no measurable time.
pub(crate) fn mix<W: Common>(isa: Isa, work: &mut W) {
    let DTypes { activation, residual, .. } = work.dtypes();
    match (Wide::of(isa), activation, residual) {
        (None, DType::F32, _) => run_portable::<(f32, f32, f32)>(work),
        (None, ..) => run_portable::<(Any, Any, Any)>(work),
        (Some(wide), DType::F32, _) => wide.run::<(f32, f32, f32)>(work),
        (Some(wide), DType::F16, DType::F32) => wide.run::<(f16, Any, f32)>(work),
        (Some(wide), DType::F16, _) => wide.run::<(f16, Any, f16)>(work),
        (Some(wide), DType::Bf16, DType::F32) => wide.run::<(bf16, Any, f32)>(work),
        (Some(wide), DType::Bf16, _) => wide.run::<(bf16, Any, bf16)>(work),
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

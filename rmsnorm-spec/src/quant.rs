//! Quantization to 8 bits: formats of codes, the choice of scales, and their layout in memory
//! ([math](crate::math), section 10).
//!
//! Always `value = code * scale`. [`QuantizedForward`](crate::QuantizedForward) is the call that
//! writes codes.
//!
//! # Example
//! ```
//! use rmsnorm_spec::quant::{CodeType, QuantSpec, ScaleKind};
//! let spec = QuantSpec::new(CodeType::E4m3, ScaleKind::Row);
//! let row = [0.5f32, -7.0, 3.0];
//! let amax = row.iter().fold(0.0, |amax: f32, value| amax.max(value.abs()));
//! let scale = spec.scale(amax);
//! let codes = row.map(|value| spec.codes.encode(value / scale));
//! assert_eq!(codes.map(|code| spec.codes.decode(code)), [32.0, -448.0, 192.0]);
//! ```

mod code;
mod layout;
mod scale;

pub use code::CodeType;
pub use layout::ScaleLayout;
pub use scale::{QuantSource, QuantSpec, ScaleKind, ScaleRounding, ScaleType, e8m0_value};

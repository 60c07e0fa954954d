//! RMS norm as a module, with `gamma` and with `1 + gamma`.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

use super::{has_one_epsilon, parameter};
use crate::Norm;
use crate::check::or_panic;

/// Declares an RMS norm and its config. The literals are their docs: of the norm, of its sum, of
/// `epsilon`, of the new weight, and of `gamma`.
macro_rules! rms_norm {
    (
        $norm:ident: $doc:literal, $gamma:literal, $of:path;
        $config:ident: $epsilon:literal, $init:literal, $initializer:expr;
        gamma: $weight:literal;
        functions: $function:ident, $function_add:ident, $function_add_function:ident
    ) => {
        #[doc = concat!("The configuration of a [`", stringify!($norm), "`].")]
        #[derive(Config, Debug)]
        pub struct $config {
            /// Elements of a row.
            pub d_model: usize,
            #[doc = $epsilon]
            #[config(default = 1e-5)]
            pub epsilon: f64,
        }

        impl $config {
            #[doc = $init]
            pub fn init(&self, device: &Device) -> $norm {
                $norm { gamma: parameter(self.d_model, $initializer, device), epsilon: self.epsilon }
            }
        }

        #[doc = $doc]
        #[derive(Module, Debug)]
        #[module(custom_display)]
        pub struct $norm {
            #[doc = $weight]
            pub gamma: Param<Tensor<1>>,
            /// The number added to the mean square.
            pub epsilon: f64,
        }

        impl $norm {
            #[doc = concat!("As [`crate::", stringify!($function), "`].")]
            ///
            /// # Shapes
            /// `x` and the result: (.., d_model), of any rank from 1.
            ///
            /// # Panics
            /// As [the crate](crate#panics) says.
            pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
                $of(self.epsilon).apply(x, self.gamma.val())
            }

            /// Returns `(y, h)`: `h = residual + x` in the dtype of `residual`, and `y` its norm in
            /// the dtype of `x`. As
            #[doc = concat!("[`crate::add_rms_norm`]", $gamma, ".")]
            ///
            /// # Shapes
            /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
            ///
            /// # Panics
            /// As [the crate](crate#panics) says.
            pub fn add_forward<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
                $of(self.epsilon).residual(residual).apply(x, self.gamma.val())
            }

            /// `residual` plus the norm of `x`, rounded once, to the dtype of `residual`. As
            #[doc = concat!("[`crate::", stringify!($function_add), "`].")]
            ///
            /// # Shapes
            /// `x`, `residual` and the result: (.., d_model), of any rank from 1.
            ///
            /// # Panics
            /// As [the crate](crate#panics) says.
            pub fn forward_add<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> Tensor<D> {
                $of(self.epsilon).residual_after(residual).apply(x, self.gamma.val())
            }

            /// Returns `(y, h)`: `h` of [`forward_add`](Self::forward_add), and `y` its norm with
            /// the weight of `next`, in the dtype of `x`. As
            #[doc = concat!("[`crate::", stringify!($function_add_function), "`].")]
            ///
            /// # Shapes
            /// `x`, `residual` and the results: (.., d_model), of any rank from 1.
            ///
            /// # Panics
            /// As [the crate](crate#panics) says, and if the `epsilon` of the two norms differ: one
            /// call has one.
            pub fn forward_add_forward<const D: usize>(
                &self,
                x: Tensor<D>,
                residual: Tensor<D>,
                next: &Self,
            ) -> (Tensor<D>, Tensor<D>) {
                or_panic(has_one_epsilon(self.epsilon, next.epsilon));
                let norm = $of(self.epsilon).residual_after(residual).next_norm(next.gamma.val());
                norm.apply(x, self.gamma.val())
            }
        }

        in_one_line!($norm);
    };
}

rms_norm! {
    RmsNorm: "RMS norm over the last dimension.", "", Norm::rms;
    RmsNormConfig: "The number added to the mean square. 1e-5 by default, as in burn's own norm.", "A norm with a weight of ones.",
        Initializer::Ones;
    gamma: "The weight: (d_model).";
    functions: rms_norm, rms_norm_add, rms_norm_add_rms_norm
}

rms_norm! {
    GemmaRmsNorm: "RMS norm over the last dimension with `1 + gamma`, which is not rounded.", ", with `1 + gamma`", Norm::gemma;
    GemmaRmsNormConfig: "The number added to the mean square. 1e-5 by default, as in burn's own norms; Gemma uses 1e-6.",
        "A norm with a weight of zeros, to which 1 is added.", Initializer::Zeros;
    gamma: "The weight minus 1: (d_model).";
    functions: gemma_rms_norm, gemma_rms_norm_add, gemma_rms_norm_add_rms_norm
}

/// The same parameter and `epsilon`.
impl From<burn::nn::RmsNorm> for RmsNorm {
    fn from(theirs: burn::nn::RmsNorm) -> Self {
        RmsNorm { gamma: theirs.gamma, epsilon: theirs.epsilon }
    }
}

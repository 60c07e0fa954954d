//! The errors of a weight before the norm: [math](rmsnorm_spec::math), section 5.7.

use rmsnorm_spec::reference::{effective_weight, round_to, weighted, weighted_backward};
use rmsnorm_spec::{DType, NormSpec};

use super::Expected;
use super::bounds::TINY;
use super::gate::Computed;
use crate::Arithmetic;

/// The weight of a call that multiplies it before the norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightFirst<'a> {
    spec: NormSpec,
    /// (cols)
    weight: &'a [f64],
}

/// The weight, if the call multiplies it before the norm.
pub(crate) fn weight_first<'a>(spec: &NormSpec, weight: Option<&'a [f64]>) -> Option<WeightFirst<'a>> {
    let weight = weight.filter(|_| spec.cast_order.is_weight_first())?;
    Some(WeightFirst { spec: *spec, weight })
}

impl WeightFirst<'_> {
    /// `weight'` of a column. An offset may be flushed, and so may its sum.
    pub(crate) fn factor(&self, col: usize, arithmetic: &Arithmetic) -> Computed {
        let value = effective_weight(&self.spec, Some(self.weight), col);
        let has_offset = self.spec.weight_offset != 0.0;
        let flushed = match (has_offset, self.weight[col].abs() < TINY) {
            (true, _) => arithmetic.flush_loss(3.0),
            (false, true) => arithmetic.flush_loss(1.0),
            (false, false) => 0.0,
        };
        let rounded = if round_to(value, DType::F32) == value { 0.0 } else { arithmetic.unit_roundoff * value.abs() };
        Computed { value, error: rounded + flushed }
    }

    /// The gradients of x and of the weight, from that of h.
    pub(crate) fn backward(&self, dh: &[f64], x: &[f64]) -> (Vec<f64>, Vec<f64>) {
        weighted_backward(&self.spec, dh, x, self.weight)
    }

    /// h, which is x times the weight, rounded to `dtype`, and its errors: none where products and
    /// sums are those of IEEE 754.
    pub(crate) fn products(&self, x: &[f64], dtype: DType, arithmetic: &Arithmetic) -> (Vec<f64>, Vec<f64>) {
        let h = weighted(&self.spec, x, self.weight, dtype);
        if arithmetic.adds_to_nearest() && !arithmetic.flushes_subnormals {
            let errors = vec![0.0; h.len()];
            return (h, errors);
        }
        let error = |(i, (h, x)): (usize, (&f64, &f64))| {
            let product = self.factor(i % self.spec.cols, arithmetic).scale(Expected::new(*x, 0.0), arithmetic);
            let (low, high) = product.interval_with_flush(dtype, arithmetic);
            (high - h).max(h - low)
        };
        let errors = h.iter().zip(x).enumerate().map(error).collect();
        (h, errors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 16 bits, h is open where its f32 product may be on either side of the middle between two
    /// values, and nowhere else; of f32 it is open by a unit of roundoff.
    #[test]
    fn h_is_open_where_a_product_may_round_either_way() {
        let either = Arithmetic { unit_roundoff: 2.0 * Arithmetic::IEEE.unit_roundoff, ..Arithmetic::IEEE };
        let spec = NormSpec::rms(1, 3, 1e-6).cast_order(rmsnorm_spec::CastOrder::WeightFirst);
        let ulp = 2f64.powi(-7);
        // A product of f32 next to the middle, an exact one, and one far from any middle.
        let (x, weight) = ([3.0, 3.0, 1.0], [(1.0 + 0.5 * ulp) / 3.0, 0.5, 1.0 + 0.3 * ulp]);
        let weight = weight.map(|weight| round_to(weight, DType::F32));
        let first = weight_first(&spec, Some(&weight)).expect("a weight before the norm");
        assert_eq!(first.products(&x, DType::Bf16, &Arithmetic::IEEE).1, [0.0; 3]);
        let (h, errors) = first.products(&x, DType::Bf16, &either);
        assert_eq!((&h[1..], &errors[..]), (&[1.5, 1.0][..], &[ulp, 0.0, 0.0][..]));
        let (_, errors) = first.products(&x, DType::F32, &either);
        assert!(errors[0] > 0.5 * either.unit_roundoff && errors[1] == 0.0 && errors[2] == 0.0, "{errors:?}");
        assert!(weight_first(&spec, None).is_none());
    }
}

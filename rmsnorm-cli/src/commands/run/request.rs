//! Turns the tensors of a file into a norm over rows and columns, and checks that their shapes and
//! dtypes fit.
//!
//! The library has no shapes, only lengths, so the errors of shapes are here.

use rmsnorm_core::{DType, NormSpec};

use super::quantize::Quantize;
use super::settings::Settings;
use crate::tensors::{Tensor, TensorFile, file_dtype};

/// The names of the input tensors.
pub const INPUTS: [&str; 7] = ["x", "weight", "bias", "residual", "gate", "dy", "dresidual_out"];

/// The name of one more input tensor, with `--codes`.
pub const SCALE: &str = "scale";

/// The tensors of a file, and the norm that they describe.
///
/// - Shapes: `residual`, `gate`, `dy` and `dresidual_out` have the shape of `x`; `weight` and `bias` have
///   its trailing dimensions.
/// - Dtypes: `weight` and `bias` share one; `residual` and `dresidual_out` share one; `gate` and
///   `dy` have the dtype of `y`, which is that of `x` unless the settings say another.
#[derive(Debug)]
pub struct Request<'a> {
    /// The norm.
    pub spec: NormSpec,
    /// The leading dimensions of `x`, with `rows` elements.
    pub batch_shape: Vec<usize>,
    /// The trailing dimensions of `x`, with `cols` elements: the shape of the weight.
    pub norm_shape: Vec<usize>,
    /// Input.
    pub x: Tensor<'a>,
    /// Input.
    pub weight: Option<Tensor<'a>>,
    /// Input.
    pub bias: Option<Tensor<'a>>,
    /// Input.
    pub residual: Option<Tensor<'a>>,
    /// Input.
    pub gate: Option<Tensor<'a>>,
    /// Input; asks for the backward pass.
    pub dy: Option<Tensor<'a>>,
    /// Input of the backward pass.
    pub dresidual_out: Option<Tensor<'a>>,
    /// The format of the codes, for a quantized result.
    pub quantize: Option<Quantize>,
    /// Input: the given scale of all codes, one f32.
    pub scale: Option<Tensor<'a>>,
    /// The dtype of the result.
    pub y_dtype: DType,
}

impl<'a> Request<'a> {
    /// Reads the input tensors of a file.
    ///
    /// # Errors
    /// A tensor breaks one of the rules above. The message has both names and the shapes or dtypes
    /// that differ.
    pub fn new(file: &TensorFile<'a>, settings: Settings) -> Result<Self, String> {
        let x = file.tensor("x")?.ok_or_else(|| no_x(file))?;
        let weight = file.tensor("weight")?;
        let bias = file.tensor("bias")?;
        let residual = file.tensor("residual")?;
        let gate = file.tensor("gate")?;
        let dy = file.tensor("dy")?;
        let dresidual_out = file.tensor("dresidual_out")?;
        let scale = if settings.quantize.is_some() { file.tensor(SCALE)? } else { None };

        for tensor in [&residual, &gate, &dy, &dresidual_out].into_iter().flatten() {
            check_shape(tensor, &x)?;
        }
        if let (Some(weight), Some(bias)) = (&weight, &bias) {
            check_shape(bias, weight)?;
            check_dtype(bias, weight)?;
        }
        let y_dtype = settings.out_dtype.unwrap_or(x.dtype);
        check_out_dtype(y_dtype, &x, residual.is_some())?;
        for tensor in [&gate, &dy].into_iter().flatten() {
            check_y_dtype(tensor, y_dtype, &x)?;
        }
        match (&gate, settings.gate) {
            (Some(_), None) => {
                return Err("there is a tensor gate, but nothing says where it belongs: pass --gate after or --gate \
                            before, with --activation, or add these as metadata"
                    .into());
            }
            (None, Some(_)) => return Err("a gate is asked for, but there is no tensor gate of the shape of x".into()),
            (None, None) | (Some(_), Some(_)) => {}
        }
        if let Some(dresidual_out) = &dresidual_out {
            check_dtype(dresidual_out, residual.as_ref().unwrap_or(&x))?;
            if dy.is_none() {
                return Err(
                    "there is dresidual_out but no dy: the backward pass needs dy; add it, or leave dresidual_out out"
                        .into(),
                );
            }
        }
        for tensor in [&weight, &bias, &residual].into_iter().flatten() {
            check_mix(tensor, y_dtype, &x)?;
        }

        let (batch_shape, norm_shape) = split_shape(&x, weight.as_ref().or(bias.as_ref()))?;
        if norm_shape.contains(&0) {
            return Err(format!(
                "x has shape {:?}: its normalized dimensions {norm_shape:?} must all be at least 1",
                x.shape
            ));
        }
        let mut spec = NormSpec::new(settings.norm, count(&batch_shape)?, count(&norm_shape)?, settings.eps)
            .weight_offset(settings.weight_offset)
            .cast_order(settings.cast_order)
            .groups(settings.groups);
        spec.gate = settings.gate;
        let quantize = settings.quantize.map(|quantize| quantize.for_shape(spec.rows, spec.cols)).transpose()?;
        if let Some(scale) = &scale {
            check_scale(scale)?;
        }
        Ok(Request {
            spec,
            batch_shape,
            norm_shape,
            x,
            weight,
            bias,
            residual,
            gate,
            dy,
            dresidual_out,
            quantize,
            scale,
            y_dtype,
        })
    }

    /// The shape of the statistics: `batch_shape`, and the groups of columns if there are several.
    pub fn statistics_shape(&self) -> Vec<usize> {
        let groups = (self.spec.groups > 1).then_some(self.spec.groups);
        self.batch_shape.iter().copied().chain(groups).collect()
    }

    /// Whether `y` has another dtype than `x`.
    pub fn is_cast(&self) -> bool {
        self.y_dtype != self.x.dtype
    }

    /// The dtype of weight and bias.
    pub fn weight_dtype(&self) -> DType {
        self.weight.as_ref().or(self.bias.as_ref()).map_or(self.y_dtype, |tensor| tensor.dtype)
    }

    /// The dtype of the residual.
    pub fn residual_dtype(&self) -> DType {
        self.residual.as_ref().unwrap_or(&self.x).dtype
    }
}

/// Checks that the call can round `x` to a result of dtype `y`.
fn check_out_dtype(y: DType, x: &Tensor<'_>, has_residual: bool) -> Result<(), String> {
    let (got, of_x) = (file_dtype(y), file_dtype(x.dtype));
    if y == x.dtype {
        return Ok(());
    }
    if has_residual {
        return Err(format!(
            "out_dtype is {got} and x is {of_x}, but there is a residual: a sum with it has a y like x; add it before \
             the run, or leave out_dtype out"
        ));
    }
    if y != DType::F32 && x.dtype != DType::F32 {
        return Err(format!("out_dtype is {got} and x is {of_x}; one of them must be F32, or both the same"));
    }
    Ok(())
}

/// Checks a tensor that goes with `y`.
fn check_y_dtype(tensor: &Tensor<'_>, y: DType, x: &Tensor<'_>) -> Result<(), String> {
    if y == x.dtype {
        return check_dtype(tensor, x);
    }
    if tensor.dtype == y {
        return Ok(());
    }
    let (got, expected) = (file_dtype(tensor.dtype), file_dtype(y));
    Err(format!("{} has dtype {got}; it must be {expected}, the out_dtype", tensor.name))
}

fn no_x(file: &TensorFile<'_>) -> String {
    format!("there is no tensor x, the input of the norm; the file has {:?}", file.names())
}

/// The leading dimensions of `x`, and its trailing ones, which are those of the weight.
fn split_shape(x: &Tensor<'_>, weight: Option<&Tensor<'_>>) -> Result<(Vec<usize>, Vec<usize>), String> {
    if x.shape.is_empty() {
        return Err("x has no dimension; it needs at least one, which is normalized".into());
    }
    let trailing = match weight {
        Some(weight) if weight.shape.is_empty() || !x.shape.ends_with(&weight.shape) => {
            let (name, shape) = (weight.name, &weight.shape);
            return Err(format!("{name} has shape {shape:?}, which must be the end of x's shape {:?}", x.shape));
        }
        Some(weight) => weight.shape.len(),
        None => 1,
    };
    let (batch_shape, norm_shape) = x.shape.split_at(x.shape.len() - trailing);
    Ok((batch_shape.to_vec(), norm_shape.to_vec()))
}

/// The number of elements.
///
/// # Errors
/// The product does not fit into a `usize`.
fn count(shape: &[usize]) -> Result<usize, String> {
    let product = shape.iter().try_fold(1usize, |product, &dimension| product.checked_mul(dimension));
    product.ok_or_else(|| format!("the dimensions {shape:?} have too many elements"))
}

/// Checks that the scale is one f32.
fn check_scale(scale: &Tensor<'_>) -> Result<(), String> {
    let (dtype, shape) = (file_dtype(scale.dtype), &scale.shape);
    if scale.dtype == DType::F32 && shape.iter().all(|dimension| *dimension == 1) {
        return Ok(());
    }
    Err(format!("scale is {dtype} of shape {shape:?}; it must be a single F32"))
}

fn check_shape(tensor: &Tensor<'_>, model: &Tensor<'_>) -> Result<(), String> {
    if tensor.shape == model.shape {
        return Ok(());
    }
    Err(format!("{} has shape {:?}, but {} has {:?}", tensor.name, tensor.shape, model.name, model.shape))
}

fn check_dtype(tensor: &Tensor<'_>, model: &Tensor<'_>) -> Result<(), String> {
    if tensor.dtype == model.dtype {
        return Ok(());
    }
    let (got, expected) = (file_dtype(tensor.dtype), file_dtype(model.dtype));
    Err(format!("{} has dtype {got}; it must be {expected}, like {}", tensor.name, model.name))
}

fn check_mix(tensor: &Tensor<'_>, y: DType, x: &Tensor<'_>) -> Result<(), String> {
    if tensor.dtype == DType::F32 || tensor.dtype == y {
        return Ok(());
    }
    let (got, expected) = (file_dtype(tensor.dtype), file_dtype(y));
    let like = if y == x.dtype { "like x" } else { "the out_dtype" };
    Err(format!("{} has dtype {got}; it must be F32 or {expected}, {like}", tensor.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_counted_without_wrapping() {
        assert_eq!(count(&[]), Ok(1));
        assert_eq!(count(&[3, 5]), Ok(15));
        assert_eq!(count(&[0, usize::MAX, 2]), Ok(0));
        for shape in [[1 << 32, 1 << 32], [1 << 62, 4], [usize::MAX, 2]] {
            assert_eq!(count(&shape), Err(format!("the dimensions {shape:?} have too many elements")));
        }
    }
}

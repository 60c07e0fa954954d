//! Checks that a burn device and a setup belong to one runtime. burn does not tell, and buffers of
//! different runtimes can be mistaken for one another.

use burn::backend::CubeDevice;
use burn::backend::wgpu::CubeTensor;
use burn::cubecl::client::Client;
use burn::tensor::Shape;
use rmsnorm_core::wgpu::WgpuBackend;
use rmsnorm_core::{AnyCall, AnyForward, Checked, DType, Error, NormBackend, NormSpec};

use super::buffers::{Lent, failed};
use crate::native::theirs;

/// Runs a norm with a known result on tensors that burn creates on the device, and reads the result
/// through burn.
pub(super) fn run(device: &CubeDevice, client: &Client, norms: &WgpuBackend) -> Result<(), Error> {
    let row = |values: &[f32]| {
        let handle = client.create_from_slice(bytemuck::cast_slice(values));
        let shape = Shape::from([values.len()]);
        CubeTensor::new_contiguous(client.clone(), device.clone(), shape, handle, theirs(DType::F32))
    };
    // With a weight of 0 the result is the bias, for every x_hat.
    let bias = [3.0f32, -0.5, 7.0, 11.0];
    let (x, weight, bias_row) = (row(&[1.0, 2.0, 3.0, 4.0]), row(&[0.0; 4]), row(&bias));
    // NaN before the call, so that old contents cannot equal the bias.
    let y = row(&[f32::NAN; 4]);
    let (x, weight, bias_row) = (Lent::dense(x)?, Lent::dense(weight)?, Lent::dense(bias_row)?);
    let y = Lent::dense(y)?;
    let mut args = AnyForward::<WgpuBackend>::new(x.input(), y.output());
    args.weight = Some(weight.input());
    args.bias = Some(bias_row.input());
    norms.launch(AnyCall::Forward(Checked::forward(NormSpec::rms(1, 4, 1.0), args)?))?;
    let got: Vec<f32> = bytemuck::pod_collect_to_vec(&client.read_one(y.into_tensor().handle).map_err(failed)?);
    if got != bias {
        let rule = format!(
            "{device:?} and the setup must come from one runtime: a trial norm wrote {bias:?}, and the device reads {got:?}"
        );
        return Err(Error::Unsupported { rule });
    }
    Ok(())
}

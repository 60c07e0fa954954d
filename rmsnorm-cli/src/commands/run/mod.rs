//! `rmsnorm run`: a norm, and its gradients if asked for, from one safetensors file to another.

mod compute;
mod quantize;
mod request;
mod settings;

use serde_json::{Map, Value, json};

use self::compute::{Compute, Computed};
use self::request::{INPUTS, Request};
use self::settings::{Settings, cast_order_name};
use crate::args::RunArgs;
use crate::failure::Failure;
use crate::output::{OutputFile, print, tell};
use crate::tensors::{OutputTensor, Serialized, TensorFile, file_dtype};
use crate::{backends, memory};

/// Reads, computes, writes, and says what was done.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let target = OutputFile::new(&args.output)?;
    let backend = backends::open(&args.backend, &args.cpu)?;
    let input = args.input.display();
    let bytes = memory::file(&args.input)?;
    let in_file = |reason: String| format!("{input}: {reason}");

    let file = TensorFile::parse(&bytes).map_err(in_file)?;
    let settings = Settings::read(&args.settings, &file).map_err(in_file)?;
    let request = Request::new(&file, settings).map_err(in_file)?;
    let computed = backend.dispatch_harness(Compute(&request)).map_err(|failure| in_file(failure.to_string()))?;
    target.write(&Serialized::new(&computed.outputs)?.parts())?;

    let is_read = |name: &str| INPUTS.contains(&name) && (name != "scale" || request.quantize.is_some());
    let ignored: Vec<String> = file.names().into_iter().filter(|name| !is_read(name)).collect();
    if !ignored.is_empty() {
        tell(&format!("note: {input}: ignored {ignored:?}; run reads {}", INPUTS.join(", ")));
    }
    let report = Report { args, request: &request, computed: &computed, ignored: &ignored };
    print(&if args.json { report.json() } else { report.text() })
}

/// What there is to say about a run that succeeded.
struct Report<'a> {
    args: &'a RunArgs,
    request: &'a Request<'a>,
    computed: &'a Computed,
    ignored: &'a [String],
}

impl Report<'_> {
    fn text(&self) -> String {
        let (spec, device) = (&self.request.spec, &self.computed.device);
        let mut text = format!("{} over {} rows of {} on {device}\n", spec.norm.name(), spec.rows, spec.cols);
        text += &format!("wrote {}\n", self.args.output.display());
        for OutputTensor { name, storage, shape, .. } in &self.computed.outputs {
            text += &format!("  {name:<12} {:<7} {shape:?}\n", file_dtype(*storage).to_string());
        }
        text
    }

    fn json(&self) -> String {
        let spec = &self.request.spec;
        let tensor = |tensor: &OutputTensor| {
            let value = json!({ "dtype": file_dtype(tensor.storage).to_string(), "shape": tensor.shape });
            (tensor.name.to_owned(), value)
        };
        let outputs: Map<String, Value> = self.computed.outputs.iter().map(tensor).collect();
        let report = json!({
            "input": self.args.input.display().to_string(),
            "output": self.args.output.display().to_string(),
            "backend": self.args.backend,
            "device": self.computed.device,
            "op": spec.norm.name(),
            "rows": spec.rows,
            "cols": spec.cols,
            "eps": spec.eps,
            "weight_offset": spec.weight_offset,
            "cast_order": cast_order_name(spec.cast_order),
            "quant": self.request.quantize.map(|quantize| quantize.described()),
            "tensors": outputs,
            "ignored": self.ignored,
        });
        format!("{report:#}\n")
    }
}

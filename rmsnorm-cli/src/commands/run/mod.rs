//! `rmsnorm run`: computes a norm, and its gradients if wanted, from one safetensors file to
//! another.

mod compute;
mod quantize;
mod request;
mod setting;
mod settings;
mod unread;

use serde_json::{Map, Value, json};

use self::compute::{Compute, Computed};
use self::request::Request;
use self::settings::{Settings, slot_name};
use self::unread::Unread;
use crate::args::RunArgs;
use crate::failure::{Failure, tell};
use crate::output::{OutputFile, print};
use crate::tensors::{OutputTensor, Serialized, TensorFile, file_dtype};
use crate::{backends, memory};

/// Reads, computes, writes, and prints a report.
pub fn run(args: &RunArgs) -> Result<(), Failure> {
    let target = OutputFile::new(&args.output)?;
    let backend = backends::open(&args.backend, &args.cpu)?;
    let input = args.input.display();
    let bytes = memory::file(&args.input)?;
    let in_file = |reason: String| format!("{input}: {reason}");

    let file = TensorFile::parse(&bytes).map_err(in_file)?;
    let unread = Unread::of(&file, &args.settings);
    if !args.allow_unknown {
        unread.refuse().map_err(in_file)?;
    }
    let settings = Settings::read(&args.settings, &file).map_err(in_file)?;
    let request = Request::new(&file, settings).map_err(in_file)?;
    let computed = backend.dispatch_harness(Compute(&request)).map_err(|failure| in_file(failure.to_string()))?;
    target.write(&Serialized::new(&computed.outputs)?.parts())?;

    for (kind, names) in [("metadata", &unread.metadata), ("tensors", &unread.tensors)] {
        if !names.is_empty() {
            tell(&format!("note: {input}: ignored {kind} {names:?}"));
        }
    }
    let report = Report { args, request: &request, computed: &computed, unread: &unread };
    print(&if args.json { report.json() } else { report.text() })
}

/// The report of a run that succeeded.
struct Report<'a> {
    args: &'a RunArgs,
    request: &'a Request<'a>,
    computed: &'a Computed,
    unread: &'a Unread,
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
            "cast_order": spec.cast_order.name(),
            "gate": spec.gate.map(|gate| slot_name(gate.slot)),
            "activation": spec.gate.map(|gate| gate.activation.name()),
            "groups": spec.groups,
            "out_dtype": self.request.y_dtype.name(),
            "quant": self.request.quantize.map(|quantize| quantize.described()),
            "tensors": outputs,
            "ignored": { "metadata": self.unread.metadata, "tensors": self.unread.tensors },
        });
        format!("{report:#}\n")
    }
}

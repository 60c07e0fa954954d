//! `rmsnorm run` on good files: each output lies inside its interval.

use rmsnorm_core::conformance::Arithmetic;
use rmsnorm_core::{Activation, CastOrder, DType, Gate, Norm, Slot};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::definition::{self, Inputs};
use crate::support::{Folder, Outcome, Tensor, Tensors, file, raw_file, read};

/// Inputs with these tensors and generated values.
pub fn inputs(norm: Norm, tensors: &[(&'static str, DType, &[usize])]) -> Inputs {
    let painted =
        |(seed, &(name, dtype, shape)): (usize, &(_, _, &[usize]))| (name, Tensor::painted(dtype, shape, seed as u64));
    let tensors: Tensors = tensors.iter().enumerate().map(painted).collect();
    let cast_order = CastOrder::AtStore;
    Inputs { norm, eps: 1e-3, weight_offset: 0.0, cast_order, gate: None, groups: 1, out_dtype: None, tensors }
}

/// Runs `in` to `out` on the CPU and compares the outputs with the definition.
pub fn check(folder: &Folder, inputs: &Inputs, args: &[&str]) -> Outcome {
    check_on(&Arithmetic::IEEE, folder, inputs, args)
}

/// The same on a backend with this arithmetic.
pub fn check_on(arithmetic: &Arithmetic, folder: &Folder, inputs: &Inputs, args: &[&str]) -> Outcome {
    let context =
        format!("{args:?} {:?}", inputs.tensors.iter().map(|(n, t)| (n, t.dtype, &t.shape)).collect::<Vec<_>>());
    let outcome = folder.rmsnorm(&[&["run", "in", "-o", "out"], args].concat());
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{context}");
    definition::check(inputs, &read(&folder.path("out")), arithmetic, &context);
    outcome
}

pub fn metadata(norm: Norm) -> [(&'static str, &'static str); 3] {
    [("op", norm.name()), ("eps", "1e-3"), ("format", "pt")]
}

#[test]
fn run_ranks_and_normalized_dimensions_give_shapes_and_values() {
    let shapes: [(&[usize], &[usize]); 9] = [
        (&[7], &[7]),
        (&[1], &[1]),
        (&[3, 33], &[33]),
        (&[2, 3, 5], &[5]),
        (&[2, 3, 5], &[3, 5]),
        (&[2, 3, 5], &[2, 3, 5]),
        (&[2, 2, 3, 4], &[4]),
        (&[2, 2, 3, 4], &[3, 4]),
        (&[2, 2, 3, 4], &[2, 3, 4]),
    ];
    let folder = Folder::new();
    for norm in Norm::ALL {
        for (x, weight) in shapes {
            let f32 = DType::F32;
            let tensors = [("x", f32, x), ("weight", f32, weight), ("bias", f32, weight), ("dy", f32, x)];
            // One column divided by its magnitude is a sign: dx is 0 but for the rounding of rstd, so no bound proves it.
            let has_dy = norm != Norm::L2Clamped || x != [1];
            let inputs = inputs(norm, if has_dy { &tensors } else { &tensors[..3] });
            folder.write("in", &file(&inputs.tensors, &metadata(norm)));
            check(&folder, &inputs, &[]);
        }
    }
}

#[test]
fn run_without_weight_normalizes_the_last_dimension() {
    let folder = Folder::new();
    for norm in Norm::ALL {
        for shape in [&[9usize] as &[_], &[4, 9], &[2, 2, 9], &[2, 1, 2, 9]] {
            let inputs = inputs(norm, &[("x", DType::F32, shape), ("dy", DType::F32, shape)]);
            folder.write("in", &file(&inputs.tensors, &metadata(norm)));
            check(&folder, &inputs, &[]);
        }
    }
}

#[test]
fn run_bias_alone_sets_the_normalized_dimensions() {
    let folder = Folder::new();
    let (x, bias): (&[usize], &[usize]) = (&[4, 2, 3], &[2, 3]);
    let tensors = [("x", DType::Bf16, x), ("bias", DType::F32, bias), ("dy", DType::Bf16, x)];
    let inputs = inputs(Norm::Layer, &tensors);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Layer)));
    check(&folder, &inputs, &[]);
}

#[test]
fn run_every_dtype_mix_with_every_tensor_matches_the_definition() {
    let folder = Folder::new();
    for norm in Norm::ALL {
        for activation in DType::ALL {
            for weight in [activation, DType::F32] {
                for residual in [activation, DType::F32] {
                    let (x, w) = (&[6usize, 37] as &[_], &[37usize] as &[_]);
                    let mut inputs = inputs(
                        norm,
                        &[
                            ("x", activation, x),
                            ("weight", weight, w),
                            ("bias", weight, w),
                            ("residual", residual, x),
                            ("dy", activation, x),
                            ("dresidual_out", residual, x),
                        ],
                    );
                    inputs.weight_offset = 1.0;
                    let metadata = [("op", norm.name()), ("eps", "1e-3"), ("weight_offset", "1")];
                    folder.write("in", &file(&inputs.tensors, &metadata));
                    check(&folder, &inputs, &[]);
                }
            }
        }
    }
}

#[test]
fn run_dresidual_out_without_residual_is_added_to_dx() {
    let folder = Folder::new();
    let shapes = ["x", "dy", "dresidual_out"].map(|name| (name, DType::F16, &[3usize, 8] as &[_]));
    let inputs = inputs(Norm::Rms, &shapes);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    check(&folder, &inputs, &[]);
}

/// Both places and activations, with groups or without, forward and backward.
#[test]
fn run_gates_and_groups_are_those_of_the_definition() {
    let folder = Folder::new();
    let x = &[2usize, 3, 40] as &[_];
    for (norm, dtype) in Norm::ALL.into_iter().flat_map(|norm| [(norm, DType::F32), (norm, DType::Bf16)]) {
        for (activation, slot) in
            Activation::ALL.into_iter().flat_map(|each| [(each, Slot::After), (each, Slot::Before)])
        {
            for (groups, order) in [(1, CastOrder::BeforeWeight), (5, CastOrder::AtStore)] {
                let vector = &[40usize] as &[_];
                let shapes = [("x", dtype, x), ("gate", dtype, x), ("dy", dtype, x)];
                let tensors = [&shapes[..], &[("weight", DType::F32, vector), ("bias", DType::F32, vector)]].concat();
                let inputs = inputs(norm, &tensors);
                let inputs = Inputs { gate: Some(Gate { activation, slot }), groups, cast_order: order, ..inputs };
                let (count, order) = (groups.to_string(), if groups == 1 { "before_weight" } else { "at_store" });
                let place = if slot == Slot::After { "after" } else { "before" };
                let of_gate = [("gate", place), ("activation", activation.name())];
                let metadata = [&metadata(norm)[..], &of_gate, &[("groups", &count), ("cast_order", order)]].concat();
                folder.write("in", &file(&inputs.tensors, &metadata));
                check(&folder, &inputs, &[]);
            }
        }
    }
}

/// Forward and backward of a `y` with another dtype than `x`, from an option and from metadata.
#[test]
fn run_out_dtype_is_that_of_y() {
    let folder = Folder::new();
    let (x, vector) = (&[2usize, 3, 40] as &[_], &[40usize] as &[_]);
    for (norm, of_x, of_y) in Norm::ALL.into_iter().flat_map(|norm| {
        [(DType::F32, DType::Bf16), (DType::F32, DType::F16), (DType::Bf16, DType::F32), (DType::F16, DType::F16)]
            .map(|(of_x, of_y)| (norm, of_x, of_y))
    }) {
        let named = [("x", of_x, x), ("dy", of_y, x), ("weight", of_y, vector), ("bias", of_y, vector)];
        let plain = Inputs { out_dtype: Some(of_y), ..inputs(norm, &named) };
        folder.write("in", &file(&plain.tensors, &metadata(norm)));
        check(&folder, &plain, &["--out-dtype", of_y.name()]);
        // Nothing but x and dy, and a gradient that is added to dx.
        let alone = [("x", of_x, x), ("dy", of_y, x), ("dresidual_out", of_x, x)];
        let alone = Inputs { out_dtype: Some(of_y), cast_order: CastOrder::BeforeWeight, ..inputs(norm, &alone) };
        let settings = [("out_dtype", of_y.name()), ("cast_order", "before_weight")];
        folder.write("in", &file(&alone.tensors, &[&metadata(norm)[..], &settings].concat()));
        check(&folder, &alone, &[]);
        let gated = [("x", of_x, x), ("gate", of_y, x), ("dy", of_y, x), ("weight", DType::F32, vector)];
        let gate = Some(Gate { activation: Activation::Silu, slot: Slot::After });
        let gated = Inputs { out_dtype: Some(of_y), gate, groups: 4, ..inputs(norm, &gated) };
        folder.write("in", &file(&gated.tensors, &metadata(norm)));
        let flags = ["--gate", "after", "--activation", "silu", "--groups", "4", "--out-dtype", of_y.name()];
        check(&folder, &gated, &flags);
    }
}

/// A residual before a gated norm, and codes of a gated result.
#[test]
fn run_gates_go_with_a_residual_and_with_codes() {
    let folder = Folder::new();
    let (x, weight) = (&[6usize, 40] as &[_], &[40usize] as &[_]);
    let names = ["x", "gate", "residual", "dy", "dresidual_out", "weight"];
    let tensors = names.map(|name| (name, DType::F32, if name == "weight" { weight } else { x }));
    let gate = Some(Gate { activation: Activation::Silu, slot: Slot::After });
    let inputs = Inputs { gate, ..inputs(Norm::Rms, &tensors) };
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    let flags = ["--gate", "after", "--activation", "silu"];
    check(&folder, &inputs, &flags);
    let y = read(&folder.path("out"))["y"].clone();
    let args = [&["run", "in", "-o", "codes", "--codes", "int8", "--keep-y", "1"][..], &flags].concat();
    assert_eq!(folder.rmsnorm(&args).code, Some(0));
    let bytes = std::fs::read(folder.path("codes")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let kept = file.tensor("y").unwrap().data().to_vec();
    assert_eq!(kept, y.bytes(), "the result that was quantized");
    let scales: Vec<f32> =
        file.tensor("scales").unwrap().data().as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    for (index, (code, y)) in file.tensor("codes").unwrap().data().iter().zip(&y.values).enumerate() {
        // Half a code, and two roundings of 127 codes.
        let decoded = f64::from(code.cast_signed()) * f64::from(scales[index / 40]);
        assert!(
            (decoded - y).abs() <= (0.5 + 127.0 * 2f64.powi(-22)) * f64::from(scales[index / 40]),
            "{index}: {decoded} and {y}"
        );
    }
}

#[test]
fn run_rounds_as_the_cast_order_says() {
    let folder = Folder::new();
    let shapes = [("x", DType::Bf16, &[16usize, 64] as &[_]), ("weight", DType::Bf16, &[64])];
    let mut inputs = inputs(Norm::Rms, &shapes);
    folder.write("in", &file(&inputs.tensors, &[("op", "rms_norm"), ("eps", "1e-3"), ("cast_order", "before_weight")]));
    check(&folder, &Inputs { cast_order: CastOrder::BeforeWeight, ..inputs.clone() }, &[]);
    let rounded_twice = std::fs::read(folder.path("out")).unwrap();
    inputs.cast_order = CastOrder::AtStore;
    check(&folder, &inputs, &["--cast-order", "at_store"]);
    assert_ne!(rounded_twice, std::fs::read(folder.path("out")).unwrap());
    inputs.cast_order = CastOrder::RstdFirst;
    check(&folder, &inputs, &["--cast-order", "rstd_first"]);
    assert_ne!(rounded_twice, std::fs::read(folder.path("out")).unwrap());
    // Backward, too, depends on a weight before the norm.
    inputs.tensors.insert("dy", inputs.tensors["x"].clone());
    inputs.cast_order = CastOrder::WeightFirst;
    folder.write("in", &file(&inputs.tensors, &[("op", "rms_norm"), ("eps", "1e-3"), ("cast_order", "weight_first")]));
    check(&folder, &inputs, &[]);
}

#[test]
fn run_flags_win_over_metadata_and_replace_it() {
    let folder = Folder::new();
    let shapes = [("x", DType::F32, &[3usize, 8] as &[_]), ("weight", DType::F32, &[8])];
    let inputs = Inputs { eps: 0.5, weight_offset: -2.0, ..inputs(Norm::Layer, &shapes) };
    let flags = ["--op", "layer_norm", "--eps", "0.5", "--weight-offset", "-2"];
    let wrong = [("op", "rms_norm"), ("eps", "none"), ("weight_offset", "7")];
    for metadata in [&wrong as &[_], &[]] {
        folder.write("in", &file(&inputs.tensors, metadata));
        check(&folder, &inputs, &flags);
    }
}

#[test]
fn run_zero_rows_writes_empty_outputs_and_zero_gradients() {
    let folder = Folder::new();
    for norm in Norm::ALL {
        for x in [&[0usize, 8] as &[_], &[3, 0, 8]] {
            let f16 = DType::F16;
            let inputs = inputs(norm, &[("x", f16, x), ("weight", f16, &[8]), ("bias", f16, &[8]), ("dy", f16, x)]);
            folder.write("in", &file(&inputs.tensors, &metadata(norm)));
            check(&folder, &inputs, &[]);
            assert_eq!(read(&folder.path("out"))["dweight"].values, [0.0; 8]);
        }
    }
}

#[test]
fn run_reads_tensors_at_odd_addresses() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::Bf16, &[3, 5]), ("weight", DType::F32, &[5])]);
    // A header may have any length, and f32 data may follow 15 elements of two bytes.
    for padding in 0..8 {
        let header = format!(
            r#"{{"__metadata__":{{"op":"rms_norm","eps":"1e-3"}},"x":{{"dtype":"BF16","shape":[3,5],"data_offsets":[0,30]}},
            "weight":{{"dtype":"F32","shape":[5],"data_offsets":[30,50]}}}}{}"#,
            " ".repeat(padding)
        );
        let data = [inputs.tensors["x"].bytes(), inputs.tensors["weight"].bytes()].concat();
        folder.write("in", &raw_file(&header, &data));
        check(&folder, &inputs, &[]);
    }
}

#[test]
fn run_output_over_input_and_over_an_older_file_replaces_it() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    folder.write("out", b"older");
    check(&folder, &inputs, &[]);
    assert_eq!(folder.rmsnorm(&["run", "in", "-o", "in"]).code, Some(0));
    assert_eq!(read(&folder.path("in")), read(&folder.path("out")));
    assert_eq!(folder.names(), ["in", "out"]);
}

#[test]
fn run_same_input_gives_the_same_file() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Layer, &[("x", DType::F16, &[50, 40]), ("dy", DType::F16, &[50, 40])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Layer)));
    check(&folder, &inputs, &[]);
    let first = std::fs::read(folder.path("out")).unwrap();
    check(&folder, &inputs, &[]);
    assert_eq!(first, std::fs::read(folder.path("out")).unwrap());
}

#[test]
fn run_goes_without_what_it_does_not_know_if_it_is_allowed_to() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 8]), ("wieght", DType::F32, &[8])]);
    let metadata = [&metadata(Norm::Rms)[..], &[("weight_ofset", "1"), ("scale", "row")]].concat();
    folder.write("in", &file(&inputs.tensors, &metadata));
    let outcome = folder.rmsnorm(&["run", "in", "-o", "out", "--allow-unknown"]);
    let notes = "note: in: ignored metadata [\"scale\", \"weight_ofset\"]\nnote: in: ignored tensors [\"wieght\"]\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), notes));
    assert_eq!(read(&folder.path("out")).len(), 2);
}

#[test]
fn run_json_says_what_was_done() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Layer, &[("x", DType::Bf16, &[2, 3, 8]), ("weight", DType::F32, &[8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Layer)));
    let report: Value = serde_json::from_str(&check(&folder, &inputs, &["--json"]).stdout).unwrap();
    assert_eq!((&report["op"], &report["rows"], &report["cols"]), (&"layer_norm".into(), &6.into(), &8.into()));
    assert_eq!(report["tensors"]["y"], serde_json::json!({ "dtype": "BF16", "shape": [2, 3, 8] }));
    assert_eq!(report["tensors"]["mean"], serde_json::json!({ "dtype": "F32", "shape": [2, 3] }));
}

#[test]
fn run_json_has_every_setting_and_every_tensor() {
    let folder = Folder::new();
    let names = ["x", "weight", "bias", "residual", "dy", "dresidual_out", "z", "a\nb"];
    let shape = |name: &str| if name == "weight" || name == "bias" { &[4usize, 8] as &[_] } else { &[3, 4, 8] };
    let inputs = inputs(Norm::Layer, &names.map(|name| (name, DType::F32, shape(name))));
    let metadata = [("op", "layer_norm"), ("eps", " 0.5 "), ("weight_offset", "-1"), ("cast_order", "at_store")];
    folder.write("in", &file(&inputs.tensors, &metadata));
    let flags = ["--cast-order", "before_weight", "--allow-unknown"];
    let outcome = folder.rmsnorm(&[&["run", "in", "-o", "out", "--json", "--threads", "1"][..], &flags].concat());
    let note = "note: in: ignored tensors [\"a\\nb\", \"z\"]\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), note));
    let mut report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert!(report["device"].take().as_str().unwrap().ends_with(", 1 thread"));
    let tensor = |shape: &[usize]| json!({ "dtype": "F32", "shape": shape });
    let (all, batch, norm) = (tensor(&[3, 4, 8]), tensor(&[3]), tensor(&[4, 8]));
    let tensors = json!({
        "y": all, "rstd": batch, "mean": batch, "residual_out": all, "dx": all, "dweight": norm, "dbias": norm,
    });
    let expected = json!({
        "input": "in", "output": "out", "backend": "cpu", "device": null, "op": "layer_norm", "rows": 3, "cols": 32,
        "eps": 0.5, "weight_offset": -1.0, "cast_order": "before_weight", "gate": null, "activation": null, "groups": 1, "out_dtype": "f32", "quant": null, "tensors": tensors,
        "ignored": { "metadata": [], "tensors": ["a\nb", "z"] },
    });
    assert_eq!(report, expected);
}

/// The eps is just above the middle between 1 and the next f32. Rounded to f64 first, it would
/// become 1.
#[test]
fn run_numbers_are_rounded_once() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    let number = "1.00000005960464477539062500000001";
    let outcome = folder.rmsnorm(&["run", "in", "-o", "out", "--json", "--weight-offset", number, "--eps", number]);
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    for name in ["eps", "weight_offset"] {
        assert_eq!(report[name].as_f64().unwrap() as f32, 1.0f32.next_up(), "{name}");
    }
}

/// The output replaces the link; the file that it pointed to is unchanged.
#[cfg(unix)]
#[test]
fn run_output_may_be_a_link_to_a_file() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    folder.write("older", b"older");
    std::os::unix::fs::symlink(folder.path("older"), folder.path("out")).unwrap();
    check(&folder, &inputs, &[]);
    assert_eq!(std::fs::read(folder.path("older")).unwrap(), b"older");
}

#[test]
fn run_text_says_what_was_done() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F16, &[2, 3, 8]), ("weight", DType::F32, &[3, 8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    let text = check(&folder, &inputs, &["--isa", "portable", "--threads", "1"]).stdout;
    let (first, rest) = text.split_once('\n').unwrap();
    assert!(first.starts_with("rms_norm over 2 rows of 24 on ") && first.ends_with("portable, 1 thread"), "{first}");
    assert_eq!(rest, "wrote out\n  y            F16     [2, 3, 8]\n  rstd         F32     [2]\n");
}

#[cfg(unix)]
#[test]
fn run_output_has_the_permissions_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 8])]);
    folder.write("in", &file(&inputs.tensors, &metadata(Norm::Rms)));
    check(&folder, &inputs, &[]);
    let mode = |name| std::fs::metadata(folder.path(name)).unwrap().permissions().mode();
    assert_eq!(mode("out"), mode("in"));
}

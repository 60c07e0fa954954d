//! `rmsnorm run` on headers with repeated names, or with sizes that overflow.

use rmsnorm_core::{DType, Norm};

use crate::bad_input::refuse;
use crate::run::{check, inputs};
use crate::support::{Folder, raw_file, read};

const FLAGS: [&str; 4] = ["--op", "rms_norm", "--eps", "1e-6"];

#[test]
fn names_that_come_twice_are_refused_at_every_level() {
    let x = r#""x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    let headers = [
        (format!(r#"{{{x},{x}}}"#), r#"the header has "x" twice"#),
        (format!(r#"{{{x},"\u0078":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}}}"#), r#"has "x" twice"#),
        (r#"{"x":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}"#.into(), r#"has "dtype" twice"#),
        (r#"{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,8],"shape":[2]}}"#.into(), r#"has "shape" twice"#),
        (r#"{"x":{"data_offsets":[0,4],"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#.into(), r#""data_offsets""#),
        (format!(r#"{{"__metadata__":{{"eps":"1","op":"rms_norm","eps":"2"}},{x}}}"#), r#"has "eps" twice"#),
        (format!(r#"{{"__metadata__":{{}},{x},"__metadata__":{{}}}}"#), r#"has "__metadata__" twice"#),
        (format!(r#"{{{x},"":{{"a":[{{"b":1,"b":null}}]}}}}"#), r#"has "b" twice"#),
        (format!(r#"{{{x},"two\nlines":1,"two\nlines":1}}"#), r#"has "two\nlines" twice"#),
    ];
    for (header, words) in headers {
        refuse(&raw_file(&header, &[0; 8]), &FLAGS, &["error: in: the header has ", words]);
    }
}

#[test]
fn names_that_come_once_in_each_object_are_no_repetition() {
    let folder = Folder::new();
    let inputs = inputs(Norm::Rms, &[("x", DType::F32, &[2, 3]), ("weight", DType::F32, &[3])]);
    let header = r#"{"__metadata__":{"op":"rms_norm","eps":"1e-3","format":"op"},
        "x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "weight":{"dtype":"F32","shape":[3],"data_offsets":[24,36]}}"#;
    let data = [inputs.tensors["x"].bytes(), inputs.tensors["weight"].bytes()].concat();
    folder.write("in", &raw_file(header, &data));
    check(&folder, &inputs, &[]);
}

#[test]
fn other_values_than_a_header_has_are_refused() {
    let headers = ["", "1", "-1", "1.5", "true", "null", "[]", r#""x""#, r#"{"x":1}"#, r#"{"x":{}}"#, "{} {}", "\0"];
    for header in headers {
        refuse(&raw_file(header, &[]), &FLAGS, &["in: not a valid safetensors file: "]);
    }
    refuse(&raw_file(&"[".repeat(10_000), &[]), &FLAGS, &["in: not a valid safetensors file: "]);
    refuse(&raw_file(&r#"{"x":"#.repeat(10_000), &[]), &FLAGS, &["in: not a valid safetensors file: "]);
    let not_utf8 = [&5u64.to_le_bytes()[..], b"{\"\xff\"}"].concat();
    refuse(&not_utf8, &FLAGS, &["in: not a valid safetensors file: ", "utf-8"]);
    for len in [100_000_001, u64::MAX - 7, u64::MAX] {
        let too_long = [&len.to_le_bytes()[..], b"{}"].concat();
        refuse(&too_long, &FLAGS, &["in: not a valid safetensors file: ", &len.to_string()]);
    }
    refuse(&[&100_000_000u64.to_le_bytes()[..], b"{}"].concat(), &FLAGS, &["the file ends within its header"]);
    refuse(&raw_file("{}", &[]), &FLAGS, &["no tensor x"]);
}

#[test]
fn sizes_that_do_not_fit_into_numbers_are_refused() {
    let shapes = [
        ("F32", "[4294967296,4294967296]"),
        ("F16", "[9223372036854775808,2]"),
        ("F32", "[4611686018427387904,4]"),
        // The number of elements fits into 64 bits, but their bytes or bits overflow.
        ("F32", "[4611686018427387904]"),
        ("F32", "[1073741824,4294967296]"),
        ("F16", "[1152921504606846976]"),
        ("F16", "[3,6148914691236517205]"),
        ("F32", "[18446744073709551616]"),
        ("F32", "[-1]"),
        ("F32", "[1099511627776,1099511627776,0]"),
    ];
    for (dtype, shape) in shapes {
        let header = format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,0]}}}}"#);
        refuse(&raw_file(&header, &[]), &FLAGS, &["in: not a valid safetensors file: "]);
    }
    // The last tensor ends behind the largest possible file.
    let part = |i: u64| {
        let (size, end) = ((1u64 << 61) - 1, |i: u64| i * ((1 << 61) - 1));
        format!(r#""{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{},{}]}}"#, end(i), end(i + 1))
    };
    let rest = r#""x":{"dtype":"U8","shape":[7],"data_offsets":[18446744073709551608,18446744073709551615]}"#;
    let header = format!("{{{},{rest}}}", (0..8).map(part).collect::<Vec<_>>().join(","));
    refuse(&raw_file(&header, &[]), &FLAGS, &["shorter or longer than its header says"]);
}

#[test]
fn no_rows_of_any_length_are_normalized() {
    let folder = Folder::new();
    for (shape, batch_shape) in
        [("[0,1099511627776]", &[0usize] as &[_]), ("[0,1099511627776,1099511627776]", &[0, 1 << 40])]
    {
        let tensor = |name: &str| format!(r#""{name}":{{"dtype":"F16","shape":{shape},"data_offsets":[0,0]}}"#);
        let header = format!("{{{}}}", ["x", "dy", "residual", "dresidual_out"].map(tensor).join(","));
        folder.write("in", &raw_file(&header, &[]));
        for op in ["rms_norm", "layer_norm"] {
            let outcome = folder.rmsnorm(&["run", "in", "-o", "out", "--op", op, "--eps", "1"]);
            assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""), "{shape} {op}");
            let outputs = read(&folder.path("out"));
            assert_eq!(outputs["rstd"].shape, batch_shape);
            assert!(outputs["dx"].values.is_empty() && outputs["dx"].shape.ends_with(&[1 << 40]));
        }
    }
}

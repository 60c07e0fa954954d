//! Runs the program in a new folder, and reads and writes safetensors files as f64 values.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::Command;

use rmsnorm_core::conformance::testing::values;
use rmsnorm_core::reference::round_to;
use rmsnorm_core::{DType, Element, bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, View};
use tempfile::TempDir;

/// The program.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_rmsnorm");

/// The outcome of a run.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A temporary folder that the program runs in.
pub struct Folder {
    folder: TempDir,
    has_gpu: bool,
}

impl Folder {
    /// The program finds no GPU here, so that tests without one are the same on every machine.
    pub fn new() -> Self {
        Folder { folder: TempDir::new().unwrap(), has_gpu: false }
    }

    /// The program finds the GPUs of the machine here.
    pub fn with_gpu() -> Self {
        Folder { has_gpu: true, ..Folder::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.path(name), bytes).unwrap();
    }

    /// The sorted names of all entries of the folder, with hidden files.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn rmsnorm(&self, args: &[&str]) -> Outcome {
        Outcome::of(self.command(PROGRAM).args(args))
    }

    /// Runs the program with these environment variables.
    pub fn rmsnorm_with(&self, variables: &[(&str, &str)], args: &[&str]) -> Outcome {
        Outcome::of(self.command(PROGRAM).envs(variables.iter().copied()).args(args))
    }

    /// Runs a shell script, in which "$0" is the program.
    #[cfg(unix)]
    pub fn shell(&self, script: &str) -> Outcome {
        Outcome::of(self.command("sh").args(["-c", script, PROGRAM]))
    }

    /// A command that runs in the folder.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.folder.path()).env_remove("RMSNORM_TUNING");
        if !self.has_gpu {
            // wgpu was built without OpenGL.
            command.env("CUDA_VISIBLE_DEVICES", "").env("WGPU_BACKEND", "gl");
            // Tuning tables of the user are not read.
            command.env("RMSNORM_CACHE_DIR", "");
        } else if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
            // Mesa prints a warning on stderr without it.
            command.env("XDG_RUNTIME_DIR", self.folder.path());
        }
        command
    }
}

impl Outcome {
    fn of(command: &mut Command) -> Self {
        let output = command.output().unwrap();
        Outcome {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A tensor. Its dtype holds the values exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

/// Tensors by name.
pub type Tensors = BTreeMap<&'static str, Tensor>;

impl Tensor {
    /// Generated [`values`], which depend on the seed.
    pub fn painted(dtype: DType, shape: &[usize], seed: u64) -> Self {
        let values = values::<f32>(seed, shape.iter().product());
        let values = values.into_iter().map(|value| round_to(f64::from(value), dtype)).collect();
        Tensor { dtype, shape: shape.to_vec(), values }
    }

    pub fn bytes(&self) -> Vec<u8> {
        fn encode<E: Element>(values: &[f64]) -> Vec<u8> {
            let elements: Vec<E> = values.iter().map(|&value| E::from_f32(value as f32)).collect();
            bytemuck::cast_slice(&elements).to_vec()
        }
        match self.dtype {
            DType::F32 => encode::<f32>(&self.values),
            DType::F16 => encode::<f16>(&self.values),
            DType::Bf16 => encode::<bf16>(&self.values),
        }
    }

    fn decode(dtype: DType, shape: &[usize], bytes: &[u8]) -> Self {
        fn decode<E: Element>(bytes: &[u8]) -> Vec<f64> {
            bytemuck::pod_collect_to_vec::<u8, E>(bytes).into_iter().map(|value| f64::from(value.to_f32())).collect()
        }
        let values = match dtype {
            DType::F32 => decode::<f32>(bytes),
            DType::F16 => decode::<f16>(bytes),
            DType::Bf16 => decode::<bf16>(bytes),
        };
        Tensor { dtype, shape: shape.to_vec(), values }
    }
}

struct Encoded<'a>(&'a Tensor, Vec<u8>);

impl View for Encoded<'_> {
    fn dtype(&self) -> Dtype {
        match self.0.dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
        }
    }
    fn shape(&self) -> &[usize] {
        &self.0.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.1)
    }
    fn data_len(&self) -> usize {
        self.1.len()
    }
}

/// A safetensors file.
pub fn file(tensors: &Tensors, metadata: &[(&str, &str)]) -> Vec<u8> {
    let metadata: HashMap<String, String> = metadata.iter().map(|&(key, value)| (key.into(), value.into())).collect();
    let encoded = tensors.iter().map(|(name, tensor)| (*name, Encoded(tensor, tensor.bytes())));
    safetensors::serialize(encoded, Some(metadata)).unwrap()
}

/// A file with this header and data, valid or not.
pub fn raw_file(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The tensors of a safetensors file.
pub fn read(path: &std::path::Path) -> BTreeMap<String, Tensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |view: &safetensors::tensor::TensorView<'_>| {
        let name = view.dtype().to_string().to_lowercase();
        Tensor::decode(DType::from_name(&name).unwrap(), view.shape(), view.data())
    };
    file.iter().map(|(name, view)| (name.to_owned(), tensor(&view))).collect()
}

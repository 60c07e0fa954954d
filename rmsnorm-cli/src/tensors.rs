//! Tensors in and out of safetensors files. What they mean is decided elsewhere.
//!
//! Files are little-endian, as are the machines that this program supports.

use std::borrow::Cow;
use std::collections::HashMap;

use rmsnorm_core::{DType, Element};
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors, View};

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and their bytes are used as they are");

/// A parsed file: names, shapes and text; the elements stay in the buffer it was read into.
#[derive(Debug)]
pub struct TensorFile<'a> {
    tensors: SafeTensors<'a>,
    metadata: HashMap<String, String>,
}

impl<'a> TensorFile<'a> {
    /// Parses the bytes of a whole file.
    ///
    /// # Errors
    /// What is wrong with it, for a person.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let parse = || {
            let (_, header) = SafeTensors::read_metadata(bytes)?;
            let metadata = header.metadata().clone().unwrap_or_default();
            Ok(TensorFile { tensors: SafeTensors::deserialize(bytes)?, metadata })
        };
        parse().map_err(|error| explain(&error))
    }

    /// The text stored under that key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    /// The names of all tensors, in alphabetical order.
    pub fn names(&self) -> Vec<&str> {
        let mut names = self.tensors.names();
        names.sort_unstable();
        names
    }

    /// The tensor of that name, if there is one.
    ///
    /// # Errors
    /// If its dtype is none of ours.
    pub fn tensor(&self, name: &'static str) -> Result<Option<Tensor<'a>>, String> {
        let Ok(view) = self.tensors.tensor(name) else { return Ok(None) };
        let found = view.dtype();
        let dtype = DType::ALL.into_iter().find(|&dtype| file_dtype(dtype) == found);
        let dtype = dtype.ok_or_else(|| format!("{name} has dtype {found}; it must be F32, F16 or BF16"))?;
        Ok(Some(Tensor { name, dtype, shape: view.shape().to_vec(), bytes: view.data() }))
    }
}

/// What a parse error means for the owner of the file.
fn explain(error: &SafeTensorError) -> String {
    if matches!(error, SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength) {
        "the file ends within its header: it is truncated or not a safetensors file".into()
    } else if matches!(error, SafeTensorError::MetadataIncompleteBuffer) {
        "the file is shorter or longer than its header says: it is truncated or damaged".into()
    } else {
        format!("not a valid safetensors file: {error}")
    }
}

/// The dtype as files spell it.
pub const fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
    }
}

/// An input tensor.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    /// Its name in the file.
    pub name: &'static str,
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    bytes: &'a [u8],
}

impl Tensor<'_> {
    /// The elements. `T` must be the type of [`dtype`](Self::dtype).
    pub fn elements<T: Element>(&self) -> Vec<T> {
        debug_assert_eq!(T::DTYPE, self.dtype, "{}", self.name);
        // The bytes lie in the file's buffer at any address, so they cannot be viewed as elements in place.
        bytemuck::pod_collect_to_vec(self.bytes)
    }
}

/// An output tensor.
#[derive(Clone, Debug)]
pub struct OutputTensor {
    /// Its name in the file.
    pub name: &'static str,
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl OutputTensor {
    /// A tensor of that shape with these elements.
    pub fn new<T: Element>(name: &'static str, shape: &[usize], elements: &[T]) -> Self {
        let bytes = bytemuck::cast_slice(elements).to_vec();
        OutputTensor { name, dtype: T::DTYPE, shape: shape.to_vec(), bytes }
    }
}

impl View for &OutputTensor {
    fn dtype(&self) -> Dtype {
        file_dtype(self.dtype)
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// The bytes of a file with these tensors and no metadata: maps of text have no fixed order in a header, and equal
/// results shall be equal files.
///
/// # Errors
/// If the tensors cannot be written as a safetensors file.
pub fn serialize(tensors: &[OutputTensor]) -> Result<Vec<u8>, String> {
    let named = tensors.iter().map(|tensor| (tensor.name, tensor));
    safetensors::serialize(named, None).map_err(|error| error.to_string())
}

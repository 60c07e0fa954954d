//! The texts of programs: files of a folder as constants, which [`sources`](crate::sources) makes.

use rmsnorm_tuning::file::{NO_TEXT, hash};

/// A file of such a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its name in the repository, as messages of a compiler have it.
    pub path: &'static str,
    /// What is in it.
    pub text: &'static str,
}

/// Tells versions of all these texts apart.
pub const fn revision(sources: &[Source]) -> u64 {
    let (mut revision, mut file) = (NO_TEXT, 0);
    while file < sources.len() {
        revision = hash(revision, sources[file].text);
        file += 1;
    }
    revision
}

/// A constant for each of these files, which lie in the crate's own folder: that folder's name in the repository, then a name and a file
/// each. With them `ALL`, their `REVISION`, and a test that no file with one of these endings is left out.
#[macro_export]
macro_rules! sources {
    ($folder:literal, $endings:expr; $($name:ident = $file:literal,)*) => {
        pub use $crate::text::Source;

        $(
            #[doc = concat!("`", $file, "`")]
            pub const $name: Source = Source { path: concat!($folder, "/", $file), text: include_str!($file) };
        )*

        /// Every file.
        pub const ALL: &[Source] = &[$($name),*];

        /// Tells versions of all these texts apart. A constant, so that who asks has no second copy of them.
        pub const REVISION: u64 = $crate::text::revision(ALL);

        #[cfg(test)]
        #[test]
        fn every_file_of_the_folder_is_listed() {
            use std::collections::BTreeSet;
            let folder = std::fs::read_dir(env!("CARGO_MANIFEST_DIR")).expect("a folder");
            let names = folder.map(|file| format!("{}/{}", $folder, file.expect("a file").file_name().display()));
            let there = names.filter(|name| $endings.iter().any(|ending| name.ends_with(ending)));
            assert_eq!(there.collect::<BTreeSet<_>>(), ALL.iter().map(|source| source.path.into()).collect());
        }
    };
}

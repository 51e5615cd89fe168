//! Puts the built stand-ins where a dynamic linker finds them, under the vendor's names.
//!
//! A library that a running process maps must never change under it. So an update writes a new file
//! and renames it over the old one, whose content lives on for those who mapped it.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

/// The libraries: what cargo calls the built file, and the vendor's SONAME.
pub const LIBRARIES: [(&str, &str); 4] = [
    ("libvramscope_fake_cuda.so", "libcuda.so.1"),
    ("libvramscope_fake_cudart.so", "libcudart.so.13"),
    ("libvramscope_fake_cupti.so", "libcupti.so.13"),
    ("libvramscope_fake_nvml.so", "libnvidia-ml.so.1"),
];

/// Why an installation failed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// A library has not been built.
    #[error(
        "{path} is missing: build it with `cargo build -p vramscope-fake-cuda \
         -p vramscope-fake-cudart -p vramscope-fake-cupti -p vramscope-fake-nvml`"
    )]
    NotBuilt {
        /// Where it should be.
        path: PathBuf,
    },
    /// A file cannot be read or written.
    #[error("failed to install {path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// Copies the libraries from a cargo output folder (`target/debug`) to `into`, which is made
/// if need be. A library that is there already with the same content is left alone. Returns the
/// paths that were written.
///
/// # Errors
/// Names the library that has not been built, or the file that cannot be read or written.
pub fn install(target_dir: &Path, into: &Path) -> Result<Vec<PathBuf>, InstallError> {
    fs::create_dir_all(into).map_err(|source| failed(into, source))?;
    let mut written = Vec::new();
    for (built, soname) in LIBRARIES {
        let source = target_dir.join(built);
        let content = fs::read(&source).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => InstallError::NotBuilt {
                path: source.clone(),
            },
            _ => failed(&source, error),
        })?;
        let target = into.join(soname);
        if fs::read(&target).is_ok_and(|present| present == content) {
            continue;
        }
        replace(into, &target, &content).map_err(|source| failed(&target, source))?;
        written.push(target);
    }
    Ok(written)
}

fn replace(folder: &Path, target: &Path, content: &[u8]) -> io::Result<()> {
    // A name of its own for each caller: two that install at once do not write into one file.
    let temporary = tempfile::Builder::new()
        .prefix(".standin-")
        .tempfile_in(folder)?;
    fs::write(temporary.path(), content)?;
    fs::set_permissions(temporary.path(), fs::Permissions::from_mode(0o755))?;
    temporary.persist(target).map_err(|error| error.error)?;
    Ok(())
}

fn failed(path: &Path, source: io::Error) -> InstallError {
    InstallError::Io {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_is_written_and_the_old_file_stays_whole_for_its_users() {
        let built = tempfile::tempdir().unwrap();
        let into = tempfile::tempdir().unwrap();
        let into = into.path().join("standins");
        for (name, _) in LIBRARIES {
            fs::write(built.path().join(name), format!("first {name}")).unwrap();
        }
        assert_eq!(install(built.path(), &into).unwrap().len(), 4);
        assert!(install(built.path(), &into).unwrap().is_empty());

        let target = into.join("libcuda.so.1");
        let mut in_use = fs::File::open(&target).unwrap();
        fs::write(built.path().join("libvramscope_fake_cuda.so"), "second").unwrap();
        let written = install(built.path(), &into).unwrap();
        assert_eq!(written, std::slice::from_ref(&target));
        assert_eq!(fs::read_to_string(&target).unwrap(), "second");
        let old = io::read_to_string(&mut in_use).unwrap();
        assert_eq!(old, "first libvramscope_fake_cuda.so");
        assert_eq!(fs::read_dir(&into).unwrap().count(), 4);
    }

    #[test]
    fn a_missing_library_is_named_with_the_way_to_build_it() {
        let empty = tempfile::tempdir().unwrap();
        let error = install(empty.path(), &empty.path().join("x")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("libvramscope_fake_cuda.so"), "{text}");
        assert!(
            text.contains("cargo build -p vramscope-fake-cuda"),
            "{text}"
        );
    }
}

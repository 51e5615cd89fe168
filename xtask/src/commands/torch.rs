//! `cargo xtask torch`: fetches the PyTorch that the tests prove the framework layer against. The
//! tests fetch the small variant themselves if it is missing; the full one is only fetched when asked.

use anyhow::Result;
use clap::Args;

use crate::torch;

/// Fetches PyTorch for the tests, into the user's cache; nothing that is there.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  cargo xtask torch            the allocator's libraries and headers (540 MB to download, 5 MB kept)
  cargo xtask torch --full     all of PyTorch as well (2.8 GB to download, 5.2 GB kept)
  cargo xtask torch --check    only say what is there; exit 1 if anything is missing

The folder is $XDG_CACHE_HOME/vramscope/vendor (~/.cache by default); VRAMSCOPE_VENDOR_CACHE names
another. python3 with pip and venv is needed.")]
pub struct Torch {
    /// Also all of PyTorch, in a virtual environment of its own
    #[arg(long)]
    pub full: bool,
    /// Only say what is there and what is missing
    #[arg(long)]
    pub check: bool,
}

/// The command.
pub fn run(options: &Torch) -> Result<()> {
    let cache = torch::cache_folder()?;
    if options.check {
        return check(&cache);
    }
    if options.full {
        println!("{}", torch::full(&cache)?.python.display());
    }
    println!("{}", torch::small(&cache)?.libraries.display());
    Ok(())
}

fn check(cache: &std::path::Path) -> Result<()> {
    let small = torch::find_small(cache).map(|small| small.libraries);
    let full = torch::find_full(cache).map(|full| full.python);
    let is_all_there = small.is_some() && full.is_some();
    for (what, path) in [("the allocator", small), ("all of PyTorch", full)] {
        match path {
            Some(path) => println!("found    {what} {}: {}", torch::VERSION, path.display()),
            None => println!("missing  {what} {}", torch::VERSION),
        }
    }
    if !is_all_there {
        anyhow::bail!("not all is there: run `cargo xtask torch --full`");
    }
    Ok(())
}

//! `vramscope-fakes`: installs the stand-ins and shows what their processes really allocated.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand};
use vramscope_fakes::{install::install, ledger::read_ledgers};

/// Stand-ins for a GPU driver stack: install them, read their ledgers.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print every ledger in a folder (the one named by VRAMSCOPE_FAKE_DIR at the run) as JSON.
    Ledger {
        /// The folder.
        folder: PathBuf,
    },
    /// Copy the built libraries to a folder under the vendor's names, for LD_LIBRARY_PATH.
    Install {
        /// The folder to copy to; made if need be.
        into: PathBuf,
        /// Where cargo put the libraries [default: this program's own folder].
        #[arg(long)]
        from: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Ledger { folder } => {
            let ledgers = read_ledgers(&folder)?;
            println!("{}", serde_json::to_string_pretty(&ledgers)?);
        }
        Command::Install { into, from } => {
            let from = match from {
                Some(folder) => folder,
                None => {
                    let program = std::env::current_exe().context("failed to find this program")?;
                    let folder = program.parent().context("this program has no folder")?;
                    folder.to_owned()
                }
            };
            for path in install(&from, &into)? {
                println!("{}", path.display());
            }
        }
    }
    Ok(())
}

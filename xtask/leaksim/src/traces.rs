//! Requests as real services saw them: when they came, how many tokens went in and came out.
//!
//! The published traces are read from a folder beside the project and never copied: Azure LLM
//! inference 2023, conversation and code (CSV, an hour each), and Mooncake conversation (gzipped
//! JSON lines, an hour). Where they are missing, three made-up traces with about their rates and
//! token counts stand in, and [`Traces::are_real`] says so: whoever shows figures has to say it too.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Gamma, LogNormal};
use rand_pcg::Pcg64Mcg;

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// Seconds after the trace's first request.
    pub at: f64,
    /// Tokens of the prompt, at least 1.
    pub prompt: u32,
    /// Tokens that were generated, at least 1.
    pub output: u32,
}

/// One trace: requests in order of time.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Short name, for reports.
    pub name: &'static str,
    /// At least a thousand, in order of time.
    pub requests: Vec<Request>,
}

impl Trace {
    /// Seconds from first to last request.
    pub fn span(&self) -> f64 {
        self.requests.last().map_or(0.0, |last| last.at)
    }

    /// Requests a second, on average.
    pub fn rate(&self) -> f64 {
        self.requests.len() as f64 / self.span()
    }
}

/// Why traces that are there cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("failed to read {path}: {cause}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// A line is not what it should be.
    #[error("{path}, line {line}: {reason}; fetch the trace again or move it away")]
    Line {
        /// Which file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// Too little to replay.
    #[error("{path} has {found} requests, too few to replay; fetch it again or move it away")]
    TooFew {
        /// Which file.
        path: PathBuf,
        /// How many there are.
        found: usize,
    },
}

/// All traces that hosts draw from.
#[derive(Debug, Clone)]
pub struct Traces {
    all: Vec<Trace>,
    real: bool,
}

/// Fewer cannot fill a slice of some minutes.
const FEWEST: usize = 1000;

const FILES: [(&str, &str, Format); 3] = [
    (
        "azure_llm_2023_conv.csv",
        "azure-conversation",
        Format::Azure,
    ),
    ("azure_llm_2023_code.csv", "azure-code", Format::Azure),
    (
        "mooncake_conversation.jsonl.gz",
        "mooncake",
        Format::Mooncake,
    ),
];

#[derive(Clone, Copy)]
enum Format {
    Azure,
    Mooncake,
}

impl Traces {
    /// The traces in a folder; made-up ones where it is not given, or lacks one of them.
    ///
    /// # Errors
    /// A file that is there and cannot be understood.
    pub fn load(folder: Option<&Path>) -> Result<Self, Error> {
        let Some(folder) = folder else {
            return Ok(Self::made_up());
        };
        if FILES
            .iter()
            .any(|(file, _, _)| !folder.join(file).is_file())
        {
            return Ok(Self::made_up());
        }
        let read = |(file, name, format): &(&str, &'static str, Format)| {
            let path = folder.join(file);
            let requests = match format {
                Format::Azure => azure(&path),
                Format::Mooncake => mooncake(&path),
            }?;
            finish(&path, name, requests)
        };
        Ok(Self {
            all: FILES.iter().map(read).collect::<Result<_, _>>()?,
            real: true,
        })
    }

    /// Traces drawn from distributions: gamma-distributed gaps (bursty) and log-normal token
    /// counts, with about the rates and means of the published traces.
    pub fn made_up() -> Self {
        // Name, requests a second, mean prompt and output tokens.
        let kinds = [
            ("made-up-conversation", 5.5, 1150.0, 210.0),
            ("made-up-code", 2.5, 2050.0, 28.0),
            ("made-up-long", 3.4, 12_000.0, 340.0),
        ];
        let all = kinds.iter().enumerate().map(|(index, kind)| {
            let &(name, rate, prompt, output) = kind;
            make_up(index as u64, name, rate, prompt, output)
        });
        Self {
            all: all.collect(),
            real: false,
        }
    }

    /// Whether they are the published ones.
    pub fn are_real(&self) -> bool {
        self.real
    }

    /// Never empty.
    pub fn all(&self) -> &[Trace] {
        &self.all
    }
}

fn make_up(seed: u64, name: &'static str, rate: f64, prompt: f64, output: f64) -> Trace {
    let mut random = Pcg64Mcg::seed_from_u64(0x7472_6163 + seed);
    // Shape 0.5 makes the gaps' standard deviation 1.4 times their mean.
    let gaps = Gamma::new(0.5, 2.0 / rate).expect("shape and scale are positive");
    let tokens = |mean: f64| {
        let spread: f64 = 1.0;
        let middle = mean.ln() - spread * spread / 2.0;
        LogNormal::new(middle, spread).expect("the spread is positive")
    };
    let (prompts, outputs) = (tokens(prompt), tokens(output));
    let mut at = 0.0;
    let mut requests = Vec::new();
    while at < 3600.0 {
        requests.push(Request {
            at,
            prompt: prompts.sample(&mut random).clamp(1.0, 120_000.0) as u32,
            output: outputs.sample(&mut random).clamp(1.0, 4_000.0) as u32,
        });
        at += gaps.sample(&mut random) + random.random_range(0.0..1e-3);
    }
    Trace { name, requests }
}

fn finish(path: &Path, name: &'static str, mut requests: Vec<Request>) -> Result<Trace, Error> {
    if requests.len() < FEWEST {
        return Err(Error::TooFew {
            path: path.to_path_buf(),
            found: requests.len(),
        });
    }
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    let first = requests[0].at;
    for request in &mut requests {
        request.at -= first;
    }
    Ok(Trace { name, requests })
}

fn read_lines<R: Read>(
    path: &Path,
    from: R,
    mut parse: impl FnMut(usize, &str) -> Result<Option<Request>, String>,
) -> Result<Vec<Request>, Error> {
    let mut requests = Vec::new();
    for (index, line) in BufReader::new(from).lines().enumerate() {
        let line = line.map_err(|cause| Error::Read {
            path: path.to_path_buf(),
            cause,
        })?;
        let request = parse(index, line.trim()).map_err(|reason| Error::Line {
            path: path.to_path_buf(),
            line: index + 1,
            reason,
        })?;
        requests.extend(request);
    }
    Ok(requests)
}

fn open(path: &Path) -> Result<File, Error> {
    File::open(path).map_err(|cause| Error::Read {
        path: path.to_path_buf(),
        cause,
    })
}

/// `TIMESTAMP,ContextTokens,GeneratedTokens`, the time as `2023-11-16 18:17:03.9799600`.
fn azure(path: &Path) -> Result<Vec<Request>, Error> {
    read_lines(path, open(path)?, |index, line| {
        if index == 0 || line.is_empty() {
            return Ok(None);
        }
        let mut fields = line.split(',');
        let mut next = |what: &str| fields.next().ok_or(format!("no {what}"));
        let (time, prompt, output) = (next("time")?, next("prompt")?, next("output")?);
        Ok(Some(Request {
            at: time_of_day(time).ok_or(format!("{time:?} is no time"))?,
            prompt: tokens(prompt)?,
            output: tokens(output)?,
        }))
    })
}

/// Seconds since midnight: the traces are an hour long, and none passes midnight.
fn time_of_day(text: &str) -> Option<f64> {
    let (_, time) = text.split_once(' ')?;
    let mut parts = time.split(':');
    let hours: f64 = parts.next()?.parse().ok()?;
    let minutes: f64 = parts.next()?.parse().ok()?;
    let seconds: f64 = parts.next()?.parse().ok()?;
    Some(hours * 3600.0 + minutes * 60.0 + seconds)
}

fn tokens(text: &str) -> Result<u32, String> {
    let count: u32 = text.parse().map_err(|_| format!("{text:?} is no count"))?;
    Ok(count.max(1))
}

/// `{"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, …}`.
fn mooncake(path: &Path) -> Result<Vec<Request>, Error> {
    #[derive(serde::Deserialize)]
    struct Line {
        timestamp: f64,
        input_length: u32,
        output_length: u32,
    }
    read_lines(path, GzDecoder::new(open(path)?), |_, line| {
        if line.is_empty() {
            return Ok(None);
        }
        let line: Line = serde_json::from_str(line).map_err(|error| error.to_string())?;
        Ok(Some(Request {
            at: line.timestamp / 1000.0,
            prompt: line.input_length.max(1),
            output: line.output_length.max(1),
        }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_folder_gives_made_up_traces() {
        let traces = Traces::load(None).unwrap();
        assert!(!traces.are_real());
        for trace in traces.all() {
            assert!((3000.0..4000.0).contains(&trace.span()), "{}", trace.name);
            assert!(trace.requests.len() > FEWEST);
        }
        assert_eq!(
            Traces::made_up().all()[0],
            traces.all()[0],
            "the same on every machine"
        );
    }

    /// Against what the files' own line counts and `awk` say.
    #[test]
    fn published_traces_are_read_whole() {
        let folder = std::env::var_os("VRAMSCOPE_SHARED").map(|shared| {
            let shared = PathBuf::from(shared);
            shared.join("data/traces")
        });
        let traces = Traces::load(folder.as_deref()).unwrap();
        if !traces.are_real() {
            eprintln!("SKIPPED: no traces (VRAMSCOPE_SHARED names the folder beside the project)");
            return;
        }
        let counts: Vec<usize> = traces.all().iter().map(|t| t.requests.len()).collect();
        assert_eq!(counts, [19_366, 8_819, 12_031]);
        for trace in traces.all() {
            assert!((3400.0..3600.0).contains(&trace.span()), "{}", trace.name);
        }
    }

    #[test]
    fn a_spoiled_line_is_named() {
        let folder = std::env::temp_dir().join(format!("leaksim-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (file, _, _) in FILES {
            std::fs::write(folder.join(file), "head\n2023-11-16 18:17:03.9,x,10\n").unwrap();
        }
        let error = Traces::load(Some(&folder)).unwrap_err().to_string();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("line 2: \"x\" is no count"), "{error}");
    }
}

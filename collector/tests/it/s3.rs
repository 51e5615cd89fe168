//! A server that speaks S3: `moto` from PyPI, in a virtual environment below the user's cache.
//!
//! It honours `If-None-Match: *`, but looks and stores in two steps; so requests are let in one at
//! a time. Without Python or PyPI the tests that need it are skipped, and say so.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

const MOTO: &str = "5.2.1";
/// What the server part of moto needs of its many extras.
const PACKAGES: &[&str] = &["moto[s3]==5.2.1", "flask>=3,<4", "flask-cors>=6,<7"];

pub const BUCKET: &str = "lakes";

const SERVER: &str = r#"
import sys, threading, urllib.request
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

app = DomainDispatcherApplication(create_backend_app)
turn = threading.Lock()

def one_at_a_time(environ, start_response):
    with turn:
        return [b"".join(app(environ, start_response))]

class Quiet(WSGIRequestHandler):
    def log(self, *arguments):
        pass

server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
urllib.request.urlopen(urllib.request.Request(f"{url}/{sys.argv[1]}", method="PUT"))
print(url, flush=True)
sys.stdin.read()
"#;

/// A running server with one bucket. Ends when dropped.
pub struct S3 {
    child: Child,
    pub url: String,
}

impl S3 {
    /// `None` where it cannot be had; says why.
    pub fn start() -> Option<S3> {
        static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
        let python = PYTHON.get_or_init(|| match python() {
            Ok(python) => Some(python),
            Err(why) => {
                eprintln!("SKIPPED: no S3 server to test with: {why}");
                None
            }
        });
        let mut child = Command::new(python.as_ref()?)
            .args(["-c", SERVER, BUCKET])
            // The server itself neither checks keys nor calls anybody.
            .envs(keys())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut url)
            .unwrap();
        assert!(url.starts_with("http://127.0.0.1:"), "{url:?}");
        let url = url.trim().to_string();
        Some(S3 { child, url })
    }

    /// What a collector needs to reach it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let mut all: Vec<_> = keys()
            .into_iter()
            .map(|(key, value)| (key, value.to_string()))
            .collect();
        all.push(("AWS_ENDPOINT_URL", self.url.clone()));
        all.push(("AWS_ALLOW_HTTP", "true".to_string()));
        all
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn keys() -> [(&'static str, &'static str); 3] {
    [
        ("AWS_ACCESS_KEY_ID", "AKIATESTTESTTEST"),
        ("AWS_SECRET_ACCESS_KEY", "hush-hush-hush"),
        ("AWS_REGION", "us-east-1"),
    ]
}

/// The environment's Python; makes the environment the first time.
fn python() -> Result<PathBuf, String> {
    let folder = cache()?.join(format!("moto-{MOTO}"));
    let python = folder.join("bin/python");
    if has_moto(&python) {
        return Ok(python);
    }
    std::fs::create_dir_all(folder.parent().unwrap_or(&folder))
        .map_err(|error| format!("{}: {error}", folder.display()))?;
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    run(Command::new(&python)
        .args(["-m", "pip", "install", "--quiet", "--no-cache-dir"])
        .args([
            "--disable-pip-version-check",
            "--retries",
            "1",
            "--timeout",
            "20",
        ])
        .args(PACKAGES))?;
    match has_moto(&python) {
        true => Ok(python),
        false => Err(format!("{} has no moto {MOTO}", folder.display())),
    }
}

fn has_moto(python: &Path) -> bool {
    let script =
        "import sys, flask, flask_cors, moto.server; sys.exit(moto.__version__ != sys.argv[1])";
    let asked = Command::new(python)
        .args(["-c", script, MOTO])
        .stderr(Stdio::null())
        .status();
    asked.is_ok_and(|status| status.success())
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(text.lines().last().unwrap_or("it failed").to_string())
}

/// As `cargo xtask` chooses it.
fn cache() -> Result<PathBuf, String> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(vendor) = set("VRAMSCOPE_VENDOR_CACHE") {
        return Ok(PathBuf::from(vendor));
    }
    let base = match (set("XDG_CACHE_HOME"), set("HOME")) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(home)) => PathBuf::from(home).join(".cache"),
        (None, None) => return Err("neither XDG_CACHE_HOME nor HOME is set".to_string()),
    };
    Ok(base.join("vramscope/vendor"))
}

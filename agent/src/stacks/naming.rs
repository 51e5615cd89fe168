//! Names are found on a thread of their own: the first stack of a large program takes a tenth of a
//! second, a stack with debug information seconds, and events must not wait for that.
//!
//! The draining side asks for each new address once, and takes answers when they are there. Downloads
//! of debug files have a thread of their own again: what needs one waits for it, and nothing else.
//!
//! Invariant: memory is bounded. Names of [`NAMED`] addresses are kept, at some 300 bytes each 10 MiB;
//! up to four times as many while stacks wait for the rest of theirs. Beyond that [`Naming::is_full`]
//! says that what waits has to do with module and offset.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use tracing::{info, warn};

use super::Location;
use super::modules::Module;
use super::symbols::debuginfod::Client;
use super::symbols::{Code, Names, Options};
use crate::Map;
use crate::spool::rows::FrameRow;

/// Return addresses whose names are kept: the stacks of a program share most of them. They are looked
/// up anew when there are more.
pub const NAMED: usize = 32_768;

type Answer = (Location, Vec<FrameRow>);

/// What the naming thread is told.
enum Message {
    Name(Location, Code),
    /// The debug file of a build came, or does not.
    Fetched(String, Option<PathBuf>),
    End,
}

/// The draining side's handle.
pub struct Naming {
    tell: Sender<Message>,
    answers: Receiver<Answer>,
    named: Map<Location, Vec<FrameRow>>,
    /// Asked for, and not answered yet.
    asked: HashSet<Location>,
    is_over: bool,
}

impl Naming {
    pub fn start(options: Options) -> Self {
        let (tell, told) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let again = tell.clone();
        let started = std::thread::Builder::new()
            .name("names".into())
            .spawn(move || Worker::new(options, again, answer).run(&told));
        if let Err(error) = &started {
            // Nobody answers then, and addresses stand for themselves.
            warn!("functions have no names: {error}");
        }
        Self {
            tell,
            answers,
            named: Map::default(),
            asked: HashSet::new(),
            is_over: started.is_err(),
        }
    }

    /// Has an address named, if that was not done before. Does not wait.
    pub fn ask(&mut self, location: Location, module: &Module) {
        if self.named.contains_key(&location) || !self.asked.insert(location) {
            return;
        }
        let told = self.tell.send(Message::Name(location, code_of(module)));
        self.is_over |= told.is_err();
    }

    /// Takes what was found. Does not wait.
    pub fn take(&mut self) {
        loop {
            match self.answers.try_recv() {
                Ok(answer) => self.enter(answer),
                Err(mpsc::TryRecvError::Empty) => return,
                Err(mpsc::TryRecvError::Disconnected) => {
                    self.is_over = true;
                    return;
                }
            }
        }
    }

    /// The same, and waits for the next answer. False if none came.
    pub fn wait(&mut self, at_most: Duration) -> bool {
        match self.answers.recv_timeout(at_most) {
            Ok(answer) => {
                self.enter(answer);
                self.take();
                true
            }
            Err(error) => {
                self.is_over |= error == RecvTimeoutError::Disconnected;
                false
            }
        }
    }

    fn enter(&mut self, (location, frames): Answer) {
        self.asked.remove(&location);
        self.named.insert(location, frames);
    }

    /// Whether an answer is to come.
    pub fn is_waiting(&self) -> bool {
        !self.is_over && !self.asked.is_empty()
    }

    /// Nothing is waited for from now on.
    pub fn give_up(&mut self) {
        self.is_over = true;
    }

    /// Whether everything is known of an address that ever will be.
    pub fn has(&self, location: Location) -> bool {
        self.is_over || self.named.contains_key(&location)
    }

    /// The frames of an address, innermost first; module and offset where they are not known.
    pub fn frames(&self, location: Location, module: &Module) -> Vec<FrameRow> {
        let named = self.named.get(&location).cloned();
        named.unwrap_or_else(|| vec![code_of(module).bare(location.offset)])
    }

    /// Too many names are kept for stacks that wait for others.
    pub fn is_full(&self) -> bool {
        self.named.len() + self.asked.len() >= 4 * NAMED
    }

    /// Forgets names when there are too many. `nobody_waits`: for the rest of a stack's names.
    pub fn tidy(&mut self, nobody_waits: bool) {
        if self.is_full() || (nobody_waits && self.named.len() >= NAMED) {
            self.named.clear();
            self.asked.clear();
        }
    }
}

impl Drop for Naming {
    fn drop(&mut self) {
        // It is not waited for: a download may take its time. What it still finds nobody takes.
        let _ = self.tell.send(Message::End);
    }
}

fn code_of(module: &Module) -> Code {
    Code {
        path: module.path.clone(),
        build_id: module.build_id.clone(),
        open_path: module.open_path(),
    }
}

/// The naming thread.
struct Worker {
    names: Names,
    answer: Sender<Answer>,
    downloads: Option<Sender<String>>,
    /// Addresses that wait for the debug file of a build.
    parked: HashMap<String, Vec<(Location, Code)>>,
    /// Builds that were asked for, and what came.
    fetched: HashMap<String, Option<PathBuf>>,
}

impl Worker {
    fn new(options: Options, again: Sender<Message>, answer: Sender<Answer>) -> Self {
        let downloads = options.debuginfod.clone().and_then(|options| {
            let (ask, asked) = mpsc::channel();
            let client = Client::new(options);
            let started = std::thread::Builder::new()
                .name("debuginfod".into())
                .spawn(move || download(&client, &asked, &again));
            if let Err(error) = &started {
                warn!("no debug files are downloaded: {error}");
            }
            started.is_ok().then_some(ask)
        });
        Self {
            names: Names::new(options),
            answer,
            downloads,
            parked: HashMap::new(),
            fetched: HashMap::new(),
        }
    }

    fn run(&mut self, told: &Receiver<Message>) {
        while let Ok(message) = told.recv() {
            match message {
                Message::Name(location, code) => self.name(location, code),
                Message::Fetched(build_id, file) => {
                    self.fetched.insert(build_id.clone(), file);
                    for (location, code) in self.parked.remove(&build_id).unwrap_or_default() {
                        self.name(location, code);
                    }
                }
                Message::End => return,
            }
        }
    }

    fn name(&mut self, location: Location, code: Code) {
        if let Some(downloads) = &self.downloads
            && let Some(build_id) = self.names.wanted(&code)
        {
            match self.fetched.get(&build_id) {
                Some(Some(file)) => self.names.fetched(&code, file),
                Some(None) => {}
                None => {
                    let waiting = self.parked.entry(build_id.clone()).or_default();
                    waiting.push((location, code));
                    if waiting.len() == 1 && downloads.send(build_id.clone()).is_err() {
                        self.fetched.insert(build_id, None);
                    }
                    return;
                }
            }
        }
        let frames = self.names.frames(&code, location.offset);
        // Nobody listens any more when the agent ends.
        let _ = self.answer.send((location, frames));
    }
}

/// The thread that downloads, one file at a time.
fn download(client: &Client, asked: &Receiver<String>, again: &Sender<Message>) {
    while let Ok(build_id) = asked.recv() {
        let file = match client.get(&build_id) {
            Ok(Some(file)) => {
                info!("debug file of build {build_id}: {}", file.display());
                Some(file)
            }
            Ok(None) => None,
            Err(error) => {
                warn!("no debug file of build {build_id}: {error:#}; its code is named without");
                None
            }
        };
        if again.send(Message::Fetched(build_id, file)).is_err() {
            return;
        }
    }
}

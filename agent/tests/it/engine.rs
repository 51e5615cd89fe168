//! A stand-in for a serving engine's front: it answers on a loopback port, in good and in bad ways,
//! and remembers what it answered.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// The n-th page.
    Page,
    NotFound,
    /// A page of something else.
    Stranger,
    /// A byte now and then, for ever.
    Slow,
    /// Lines without an end, as fast as they are taken.
    Endless,
    /// A head that promises more than anybody should read.
    Huge,
    /// What is no HTTP.
    Broken,
    /// A head that never ends.
    LongHead,
    /// Less than the head promises.
    Cut,
    /// Nothing at all.
    Silent,
}

/// See the module's text.
#[derive(Clone)]
pub struct Engine {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
}

struct State {
    manner: Manner,
    page: fn(u64) -> String,
    /// Pages that went out whole.
    served: u64,
    connections: u64,
    open: u64,
    most_open: u64,
}

impl Engine {
    /// `page` makes the n-th page, from 1.
    pub fn start(address: &str, page: fn(u64) -> String) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let engine = Self {
            address: listener.local_addr().unwrap(),
            state: Arc::new(Mutex::new(State {
                manner: Manner::Page,
                page,
                served: 0,
                connections: 0,
                open: 0,
                most_open: 0,
            })),
        };
        let accepting = engine.clone();
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let engine = accepting.clone();
                std::thread::spawn(move || {
                    {
                        let mut state = engine.state.lock().unwrap();
                        state.connections += 1;
                        state.open += 1;
                        state.most_open = state.most_open.max(state.open);
                    }
                    // Whoever asked may have gone.
                    let _ = engine.answer(stream);
                    engine.state.lock().unwrap().open -= 1;
                });
            }
        });
        engine
    }

    pub fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }

    pub fn be(&self, manner: Manner) {
        self.state.lock().unwrap().manner = manner;
    }

    pub fn served(&self) -> u64 {
        self.state.lock().unwrap().served
    }

    /// Connections so far, and the most that were open at one time.
    pub fn connections(&self) -> (u64, u64) {
        let state = self.state.lock().unwrap();
        (state.connections, state.most_open)
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        assert_eq!(line, "GET /metrics HTTP/1.1\r\n");
        while line != "\r\n" {
            line.clear();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
        }
        let (manner, number, make) = {
            let state = self.state.lock().unwrap();
            (state.manner, state.served + 1, state.page)
        };
        let head = |length: usize| {
            format!(
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\r\n"
            )
        };
        match manner {
            Manner::Page => {
                let page = make(number);
                // Before the answer: whoever has it may look at once.
                self.state.lock().unwrap().served += 1;
                stream.write_all((head(page.len()) + &page).as_bytes())
            }
            Manner::NotFound => {
                stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            }
            Manner::Stranger => stream.write_all((head(16) + "go_goroutines 7\n").as_bytes()),
            Manner::Broken => stream.write_all(b"\x00\x01\x02 what?\r\n\r\n"),
            Manner::Cut => stream.write_all((head(1000) + &make(number)[..20]).as_bytes()),
            Manner::Huge => {
                stream.write_all(head(1 << 40).as_bytes())?;
                self.pour(stream, b"vllm:num_requests_running 1\n")
            }
            Manner::Endless => {
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
                self.pour(stream, b"vllm:num_requests_running{a=\"\\\"")
            }
            Manner::LongHead => {
                stream.write_all(b"HTTP/1.1 200 OK\r\n")?;
                self.pour(stream, b"X-More: and more\r\n")
            }
            Manner::Slow => {
                stream.write_all(head(1 << 20).as_bytes())?;
                loop {
                    stream.write_all(b"v")?;
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            Manner::Silent => {
                std::thread::sleep(Duration::from_secs(60));
                Ok(())
            }
        }
    }

    fn pour(&self, mut stream: TcpStream, bytes: &[u8]) -> std::io::Result<()> {
        let much = bytes.repeat(64 * 1024 / bytes.len());
        loop {
            stream.write_all(&much)?;
        }
    }
}

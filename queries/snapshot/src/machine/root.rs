//! The dictionary that is the file: what becomes of the value of each key.

use super::{Error, Kind, Machine, Role, Value};
use crate::build::{self, Key};
use crate::tables::Text;

/// Names of keys that are kept for the report.
const NAMED: usize = 32;

impl Machine {
    /// What a list below a key of the file's dictionary is for.
    pub(super) fn role_of_key(&self, key: Text) -> Role {
        match Key::of(key) {
            Some(Key::Segments) => Role::Segments { host: false },
            Some(Key::HostSegments) => Role::Segments { host: true },
            Some(Key::DeviceTraces) => Role::Traces { host: false },
            Some(Key::HostTraces) => Role::Traces { host: true },
            Some(Key::AllocatorSettings) => Role::Plain,
            _ => Role::Ignored,
        }
    }

    pub(super) fn set_root(&mut self, key: Value, value: Value) -> Result<(), Error> {
        let Value::Text(text) = key else {
            return Err(self.unexpected("a text as key of the file's dictionary", key.kind()));
        };
        let name = self.tables.text(text).to_string();
        let is_known = Key::of(text).is_some_and(Key::is_top_level);
        if is_known && self.root_keys.contains(&name) {
            return Err(self.unexpected("each key once", format!("`{name}` twice")));
        }
        if self.root_keys.len() < NAMED {
            self.root_keys.push(name.clone());
        }
        match Key::of(text) {
            Some(Key::Segments | Key::HostSegments) => {
                let role = self.role_of_key(text);
                self.set_list(role, value)?;
                self.has_content = true;
            }
            Some(Key::DeviceTraces | Key::HostTraces) => {
                let role = self.role_of_key(text);
                let count = self.set_list(role, value)?;
                if let Role::Traces { host: false } = role {
                    self.outline.device_traces = count as usize;
                }
                self.has_content = true;
            }
            Some(Key::AllocatorSettings) => {
                self.outline.settings = build::settings(&self.nodes, &self.tables, value);
                self.release(value);
            }
            _ => {
                if self.outline.skipped_keys.len() < NAMED {
                    self.outline.skipped_keys.push(name);
                }
                self.release(value);
            }
        }
        Ok(())
    }

    /// A list of segments or traces is complete; how many elements it had. What was not handed out
    /// on the way is now.
    fn set_list(&mut self, role: Role, value: Value) -> Result<u64, Error> {
        let handle = match value {
            Value::None => return Ok(0),
            Value::Node(handle) => handle,
            other => return Err(self.unexpected("a list", other.kind())),
        };
        let Some(node) = self.nodes.get(handle) else {
            return Err(self.gone());
        };
        if node.kind == Kind::Dict {
            return Err(self.unexpected("a list", "a dictionary"));
        }
        if node.role != role && node.role != Role::Plain {
            return Err(self.unexpected("a list of its own for each key", "one of another key"));
        }
        let waiting = node.items.clone();
        let mut count = node.gone;
        for element in waiting {
            if let Role::Traces { host } = role {
                self.consume_elements(host, count as u32, element)?;
            } else {
                self.consume(role, element)?;
            }
            count += 1;
        }
        self.release(value);
        Ok(count)
    }

    /// An element of a list of traces.
    pub(super) fn consume_trace(&mut self, host: bool, value: Value) -> Result<(), Error> {
        let (role, kind) = match value {
            Value::Node(handle) => match self.nodes.get(handle) {
                Some(node) => (node.role, node.kind),
                None => return Err(self.gone()),
            },
            other => return Err(self.unexpected("a trace", other.kind())),
        };
        match (role, kind) {
            (Role::Trace { host: of_host, .. }, _) if of_host == host => {
                self.release(value);
                Ok(())
            }
            // Entries without a list for each device.
            (_, Kind::Dict) => self.consume(Role::Trace { host, index: 0 }, value),
            _ => Err(self.unexpected("a trace", "a list that was made elsewhere")),
        }
    }

    fn consume_elements(&mut self, host: bool, index: u32, trace: Value) -> Result<(), Error> {
        let Value::Node(handle) = trace else {
            return Err(self.unexpected("a trace", trace.kind()));
        };
        let Some(node) = self.nodes.get(handle) else {
            return Err(self.gone());
        };
        if node.kind == Kind::Dict {
            return self.consume(Role::Trace { host, index: 0 }, trace);
        }
        for entry in node.items.clone() {
            self.consume(Role::Trace { host, index }, entry)?;
        }
        self.release(trace);
        Ok(())
    }
}

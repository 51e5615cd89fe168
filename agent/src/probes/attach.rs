//! Attaches the programs to a library: to functions by name, and to the places where a framework's
//! allocator tells of itself ([`super::places`]).

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use anyhow::Context;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeScope};
use tracing::warn;
use vramscope_ebpf_abi::framework;

use super::bpf::{Attachment, FRAMEWORK, NOT_EXPORTED, Probes, chain};
use super::hooks::{HOOKS, Layer};
use super::multi::{self, Site};
use super::places::{self, Place};
use super::site::{Chosen, choose_sites};
use crate::host::library::{FileId, Library};
use crate::host::perf;

impl Probes {
    /// Attaches every hook of the library's layer that it exports. A library that was attached
    /// before is left as it is. Never fails as a whole: what could not be attached says why.
    pub fn attach(&mut self, library: &Library) -> &[Attachment] {
        if !self.attached.contains_key(&library.id) {
            let attachments = match library.layer {
                Layer::Framework => self.attach_framework(library),
                Layer::Driver | Layer::Runtime => self.attach_new(library),
            };
            self.attached.insert(library.id, attachments);
        }
        &self.attached[&library.id]
    }

    /// Hooks the places of a framework's allocator in a library. What it reports of one name is
    /// one row, however many places there are.
    fn attach_framework(&mut self, library: &Library) -> Vec<Attachment> {
        let mut found = match places::find(library) {
            Ok(found) => found,
            Err(error) => {
                return vec![Attachment {
                    symbol: crate::host::discovery::WHOLE_LIBRARY,
                    refused: Some(format!("{error:#}")),
                }];
            }
        };
        if let Err(error) = self.attach_places(library, &found.places) {
            warn!(
                library = library.path,
                "one link for all places failed, hooking one by one: {error:#}"
            );
            for place in &found.places {
                if let Err(error) = self.attach_place(library, place) {
                    found.refused.push((place.symbol, format!("{error:#}")));
                }
            }
        }
        let places = |symbol| found.places.iter().filter(|p| p.symbol == symbol).count();
        found
            .symbols()
            .into_iter()
            .map(|symbol| {
                let reasons: Vec<&str> = found
                    .refused
                    .iter()
                    .filter(|(refused, _)| *refused == symbol)
                    .map(|(_, reason)| reason.as_str())
                    .collect();
                let all = places(symbol);
                let refused = match (reasons.len(), all) {
                    (0, _) => None,
                    (_, 0) => Some(reasons.join("; ")),
                    (bad, _) => Some(format!(
                        "{bad} of its places cannot be hooked: {}",
                        reasons.join("; ")
                    )),
                };
                Attachment { symbol, refused }
            })
            .collect()
    }

    fn site_of(&mut self, place: &Place) -> anyhow::Result<Site> {
        let cookie = framework::Cookie {
            what: place.what,
            site: self.sites.number(&place.site)?,
        };
        Ok(Site {
            offset: place.offset,
            cookie: cookie.pack(),
            counter: place.counter,
        })
    }

    fn framework_pin(&self, library: &Library, what: &str) -> Option<PathBuf> {
        let pins = self.pins.as_ref()?;
        let name = link_name(library.id, what, FRAMEWORK);
        Some(pins.join("links").join(name))
    }

    /// Hooks all places by one link, where the kernel can.
    fn attach_places(&mut self, library: &Library, places: &[Place]) -> anyhow::Result<()> {
        if places.is_empty() {
            return Ok(());
        }
        let pin = self.framework_pin(library, "all");
        if pin.as_ref().is_some_and(|pin| pin.exists()) {
            return Ok(());
        }
        // Hooked one by one by an agent before: doing it again would count everything twice.
        let one_by_one = places.iter().any(|place| {
            let pin = self.framework_pin(library, &format!("{:x}", place.offset));
            pin.is_some_and(|pin| pin.exists())
        });
        let sites = places
            .iter()
            .map(|place| self.site_of(place))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let Some(multi) = self.multi.as_ref().filter(|_| !one_by_one) else {
            return places
                .iter()
                .try_for_each(|place| self.attach_place(library, place));
        };
        let link = multi::link(&multi.framework, &library.open_path, &sites, false)
            .map_err(|error| explain(error, sites.iter().any(|site| site.counter != 0)))?;
        self.keep(library, link, pin)
    }

    /// Hooks one place by a perf event.
    fn attach_place(&mut self, library: &Library, place: &Place) -> anyhow::Result<()> {
        let pin = self.framework_pin(library, &format!("{:x}", place.offset));
        if let Some(pin) = &pin
            && PinnedLink::from_pin(pin).is_ok()
        {
            return Ok(());
        }
        let site = self.site_of(place)?;
        let counter = u32::try_from(place.counter)
            .context("its counter lies beyond 4 GiB of the file, where no perf event reaches")?;
        let event = perf::open_everywhere(&library.open_path, site.offset, counter)
            .map_err(|error| explain(error, counter != 0))?;
        let program = self.programs.get(FRAMEWORK)?;
        let program = program.fd()?.as_fd().as_raw_fd();
        let link = multi::perf_link(program, &event, site.cookie)
            .map_err(|error| explain(error, counter != 0))?;
        self.keep(library, link, pin)
    }

    fn keep(
        &mut self,
        library: &Library,
        link: OwnedFd,
        pin: Option<PathBuf>,
    ) -> anyhow::Result<()> {
        match pin {
            Some(pin) => multi::pin(&link, &pin)
                .with_context(|| format!("failed to pin {}", pin.display()))?,
            None => self.links.push((library.id, link)),
        }
        Ok(())
    }

    fn attach_new(&mut self, library: &Library) -> Vec<Attachment> {
        let symbols = match library.function_offsets() {
            Ok(symbols) => symbols,
            Err(error) => {
                let refused = format!("{error:#}");
                return hooks_of(library.layer)
                    .map(|(_, hook)| Attachment {
                        symbol: hook.symbol,
                        refused: Some(refused.clone()),
                    })
                    .collect();
            }
        };
        let Chosen { sites, same_code } = choose_sites(library, &symbols);
        let at_once = self
            .attach_at_once(library, &sites)
            .unwrap_or_else(|error| {
                warn!(
                    library = library.path,
                    "one link for all functions failed, hooking one by one: {error:#}"
                );
                false
            });
        hooks_of(library.layer)
            .map(|(_, hook)| {
                let site = sites.iter().find(|(symbol, _)| *symbol == hook.symbol);
                let twin = same_code.get(hook.symbol);
                let refused = match site {
                    None if twin.is_some() => {
                        twin.map(|twin| format!("the same code as {twin}, which is hooked"))
                    }
                    None => Some(NOT_EXPORTED.to_string()),
                    Some(_) if at_once => None,
                    Some((symbol, site)) => self
                        .attach_one(library, symbol, *site)
                        .err()
                        .map(|error| format!("{error:#}")),
                };
                Attachment {
                    symbol: hook.symbol,
                    refused,
                }
            })
            .collect()
    }

    /// Hooks all functions of a library by one link for the returns and one for the entries.
    /// False where that cannot be done.
    fn attach_at_once(
        &mut self,
        library: &Library,
        sites: &[(&str, Site)],
    ) -> anyhow::Result<bool> {
        let Some(multi) = self.multi.as_ref().filter(|_| !sites.is_empty()) else {
            return Ok(false);
        };
        let pin = |what: &str, program: &str| {
            let pins = self.pins.as_ref()?;
            Some(
                pins.join("links")
                    .join(link_name(library.id, what, program)),
            )
        };
        // Hooked one by one by an agent before: doing it again would count everything twice.
        let one_by_one = sites
            .iter()
            .any(|(symbol, _)| pin(symbol, "leave").is_some_and(|pin| pin.exists()));
        if one_by_one {
            return Ok(false);
        }
        let sites: Vec<Site> = sites.iter().map(|(_, site)| *site).collect();
        let mut links = Vec::new();
        // The returns first, as in `attach_one`.
        for (name, program) in [("leave", &multi.leave), ("enter", &multi.enter)] {
            let pin = pin("all", name);
            if pin.as_ref().is_some_and(|pin| pin.exists()) {
                continue;
            }
            let link = multi::link(program, &library.open_path, &sites, name == "leave")?;
            match pin {
                Some(pin) => multi::pin(&link, &pin)
                    .with_context(|| format!("failed to pin {}", pin.display()))?,
                None => links.push((library.id, link)),
            }
        }
        self.links.extend(links);
        Ok(true)
    }

    fn attach_one(&mut self, library: &Library, symbol: &str, site: Site) -> anyhow::Result<()> {
        // The return probe first: a call that is entered in between is then counted as missed,
        // where the other order would leave an entry without an end.
        for name in ["leave", "enter"] {
            let pin = self
                .pins
                .as_ref()
                .map(|pins| pins.join("links").join(link_name(library.id, symbol, name)));
            if let Some(pin) = &pin
                && PinnedLink::from_pin(pin).is_ok()
            {
                continue;
            }
            let program = self.programs.get(name)?;
            let point = UProbeAttachPoint {
                location: UProbeAttachLocation::AbsoluteOffset(site.offset),
                cookie: Some(site.cookie),
            };
            let id = program
                .attach(point, &library.open_path, UProbeScope::AllProcesses)
                .map_err(|error| anyhow::anyhow!("failed to attach: {}", chain(&error)))?;
            if let Some(pin) = pin {
                let link: FdLink = program.take_link(id)?.try_into()?;
                link.pin(&pin)
                    .with_context(|| format!("failed to pin {}", pin.display()))?;
            } else {
                self.perf_links.push((library.id, name, id));
            }
        }
        Ok(())
    }
}

pub(super) fn hooks_of(layer: Layer) -> impl Iterator<Item = (u16, &'static super::hooks::Hook)> {
    (0u16..)
        .zip(HOOKS)
        .filter(move |(_, hook)| hook.layer == layer)
}

/// An error of the kernel, with what it means at a probe that has a counter.
fn explain(error: io::Error, has_counter: bool) -> anyhow::Error {
    if has_counter && error.raw_os_error() == Some(libc::EINVAL) {
        return anyhow::Error::new(error).context(
            "another tool has a probe at this place without the counter that turns it on, and the kernel allows no second one with it; end that tool, then restart this agent",
        );
    }
    anyhow::Error::new(error).context("failed to attach")
}

/// bpffs allows no dots in names.
fn link_name(id: FileId, symbol: &str, program: &str) -> OsString {
    format!("{:x}-{:x}-{symbol}-{program}", id.device, id.inode).into()
}

//! Which container and pod a process runs in, from its cgroup and its environment.
//!
//! Container engines name a process's cgroup after the container: 64 hexadecimal digits, alone or
//! inside a systemd unit's name. Kubernetes puts the pod's uid above it. A pod's name and namespace
//! are in no cgroup; they are known only if the pod hands them down as `POD_NAME` and
//! `POD_NAMESPACE`. What cannot be told is `None`.

use serde::{Deserialize, Serialize};

/// Where a process runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// 64 hexadecimal digits.
    pub id: Option<String>,
    /// With dashes, in lower case.
    pub pod_uid: Option<String>,
    pub pod: Option<String>,
    pub namespace: Option<String>,
}

impl Container {
    /// `cgroup` is the text of `/proc/PID/cgroup`.
    pub fn parse(cgroup: &str, pod: Option<String>, namespace: Option<String>) -> Self {
        // All hierarchies of version 1 tell the same, if they tell at all; the named one and that of
        // version 2 are as good.
        let paths = || cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        Self {
            id: paths().find_map(container_id),
            pod_uid: paths().find_map(pod_uid),
            pod,
            namespace,
        }
    }
}

/// Container ids are those of the innermost container: engines nest (kind, Docker in Docker).
fn container_id(path: &str) -> Option<String> {
    path.rsplit('/').find_map(|part| {
        // Units are `docker-ID.scope`, `cri-containerd-ID.scope`, `crio-ID.scope`,
        // `libpod-ID.scope`; with the cgroupfs driver of containerd there may be a slice and the
        // engine before the id: `system.slice:docker:ID`, `kubepods-podUID.slice:cri-containerd:ID`.
        let name = part
            .strip_suffix(".scope")
            .or_else(|| part.strip_suffix(".service"))
            .unwrap_or(part);
        let id = name.rsplit(['-', ':']).next()?;
        // The monitor of a CRI-O or Podman container is beside it, not inside.
        let is_monitor = name.contains("conmon");
        let is_id = id.len() == 64 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        (is_id && !is_monitor).then(|| id.to_string())
    })
}

/// `kubepods/burstable/podUID` (cgroupfs) or `kubepods-burstable-podUID.slice` (systemd, where
/// dashes of the uid are written as underscores).
fn pod_uid(path: &str) -> Option<String> {
    if !path.contains("kubepods") {
        return None;
    }
    path.rsplit('/').find_map(|part| {
        let part = part.split(':').next()?;
        let name = part.strip_suffix(".slice").unwrap_or(part);
        let (before, uid) = name.rsplit_once("pod")?;
        if !(before.is_empty() || before.ends_with('-')) {
            return None;
        }
        let uid = uid.replace('_', "-").to_ascii_lowercase();
        // A uid, or the digest that names a static pod.
        let digits = uid.bytes().filter(u8::is_ascii_hexdigit).count();
        let dashes = uid.bytes().filter(|b| *b == b'-').count();
        let is_uid = digits == 32 && digits + dashes == uid.len() && matches!(dashes, 0 | 4);
        is_uid.then_some(uid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f2b8f0c9d1e4a5b6c7d8e9f00112233445566778899aabbccddeeff00112233";
    const UID: &str = "0b3f8b52-9f4e-4d0e-a1c5-6f6e0f8a1234";
    const STATIC: &str = "8a1c2f6be2f5c9d5c2f6a1b2c3d4e5f6";

    /// Paths as the engines' documentation and their issue trackers show them, with this id and
    /// uid put in.
    #[test]
    fn paths_of_every_engine() {
        let under = UID.replace('-', "_");
        let cases: &[(&str, String, Option<&str>, Option<&str>)] = &[
            (
                "bare process",
                "0::/user.slice/user-1000.slice/session-2.scope".into(),
                None,
                None,
            ),
            (
                "systemd service",
                "0::/system.slice/nvidia-persistenced.service".into(),
                None,
                None,
            ),
            ("root", "0::/".into(), None, None),
            (
                "docker v1 cgroupfs",
                format!("12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}"),
                Some(ID),
                None,
            ),
            (
                "docker v2 systemd",
                format!("0::/system.slice/docker-{ID}.scope"),
                Some(ID),
                None,
            ),
            (
                "docker v2, a folder below",
                format!("0::/system.slice/docker-{ID}.scope/init"),
                Some(ID),
                None,
            ),
            (
                "docker in docker",
                format!("0::/docker/{}/docker/{ID}", ID.replace('3', "4")),
                Some(ID),
                None,
            ),
            (
                "containerd by ctr",
                format!("0::/default/{ID}"),
                Some(ID),
                None,
            ),
            (
                "podman v2",
                format!("0::/machine.slice/libpod-{ID}.scope/container"),
                Some(ID),
                None,
            ),
            (
                "podman rootless",
                format!(
                    "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"
                ),
                Some(ID),
                None,
            ),
            (
                "podman's monitor",
                format!("0::/machine.slice/libpod-conmon-{ID}.scope"),
                None,
                None,
            ),
            (
                "k8s v1 cgroupfs, docker",
                format!("11:devices:/kubepods/burstable/pod{UID}/{ID}"),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s v1 cgroupfs, guaranteed",
                format!("4:memory:/kubepods/pod{UID}/{ID}"),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s v1 systemd, docker",
                format!(
                    "9:cpu:/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice/docker-{ID}.scope"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s v2 systemd, containerd",
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s v2 systemd, guaranteed",
                format!("0::/kubepods.slice/kubepods-pod{under}.slice/cri-containerd-{ID}.scope"),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s v2 systemd, CRI-O",
                format!("0::/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope/container"),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s CRI-O's monitor",
                format!("0::/kubepods.slice/kubepods-pod{under}.slice/crio-conmon-{ID}.scope"),
                None,
                Some(UID),
            ),
            (
                "containerd with a mixed driver",
                format!(
                    "0::/system.slice/containerd.service/kubepods-burstable-pod{under}.slice:cri-containerd:{ID}"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                "k8s static pod",
                format!("0::/kubepods/burstable/pod{STATIC}/{ID}"),
                Some(ID),
                Some(STATIC),
            ),
            (
                "kind",
                format!(
                    "0::/docker/{}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope",
                    ID.replace('3', "4")
                ),
                Some(ID),
                Some(UID),
            ),
            (
                "from inside another cgroup namespace",
                format!("0::/../../kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope"),
                Some(ID),
                Some(UID),
            ),
            (
                "v1 with controllers in the root",
                format!(
                    "3:pids:/\n2:cpu,cpuacct:/kubepods/besteffort/pod{UID}/{ID}\n1:name=systemd:/"
                ),
                Some(ID),
                Some(UID),
            ),
            (
                "a hexadecimal name that is too short",
                "0::/docker/3f2b8f0c9d1e".into(),
                None,
                None,
            ),
            (
                "a user's folder that is named like a pod",
                "0::/kubepods/tripod/x".into(),
                None,
                None,
            ),
        ];
        for (name, text, id, uid) in cases {
            let container = Container::parse(text, None, None);
            let found = (container.id.as_deref(), container.pod_uid.as_deref());
            assert_eq!(found, (*id, *uid), "{name}: {text}");
        }
    }

    #[test]
    fn lines_without_sense_tell_nothing() {
        for text in [
            "",
            ":::",
            "1:a",
            "0::",
            "0::/kubepods/pod",
            "0::/kubepods/podx_y",
        ] {
            let container = Container::parse(text, None, None);
            assert_eq!(container, Container::default(), "{text:?}");
        }
    }
}

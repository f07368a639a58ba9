//! A group's folder.
//!
//! It belongs to the daemon, and so does what the control daemon and its server say (`control.out`). Only `pipe` and `log` in
//! it are the group's user's, and may be anything: no path leads through them, and nothing in them is read.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::{
    fs::{AtFlags, CWD, Dir, FallocateFlags, FileType, Mode, OFlags, fallocate, openat, unlinkat},
    io::Errno,
};

use crate::{
    examine::{self, Examiner},
    paths::MPS_VARIABLES,
    peer::{ProcessFd, ProcessId},
    store::open_regular,
};

/// Bytes of the output that are kept, and read at once, at most.
const MAX_LOG: u64 = 64 * 1024;
/// After so many read bytes what was read is given back to the disk.
const MAX_READ: u64 = 1024 * 1024;
/// How deep, and how much, is removed of what a user has put into its part.
const MAX_DEPTH: u32 = 8;
const MAX_REMOVED: u32 = 16 * 1024;

/// How the names of NVIDIA's control program and server begin, as far as the kernel keeps them.
const PROGRAMS: &str = "nvidia-cuda-mps";

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

#[derive(Clone, Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Makes one for a user, at a place where only the daemon can make anything.
    pub(super) fn make(path: &Path, uid: u32, gid: u32) -> io::Result<Self> {
        let root = rustix::process::geteuid().is_root();
        make(path, 0o711)?;
        for own in ["pipe", "log"].map(|name| path.join(name)) {
            make(&own, 0o700)?;
            if root {
                chown(&own, Some(uid), Some(gid))?;
            }
        }
        Ok(Self(path.to_owned()))
    }

    /// One that a daemon has made, if no other user has put it there.
    pub(super) fn find(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        let own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
        own.then(|| Self(path.to_owned()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn pipe(&self) -> PathBuf {
        self.0.join("pipe")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// Where a control daemon that starts now writes. There is room for what is kept: a file system that its user has filled takes
    /// folders and sockets, but no output, and what a group writes tells of its faults and of unauthorized clients.
    pub(super) fn begin_output(&self) -> io::Result<File> {
        match fs::remove_file(self.output_path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.append(true).create_new(true).mode(0o600);
        let file = options.open(self.output_path())?;
        match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, MAX_LOG) {
            // Not every file system can.
            Ok(()) | Err(Errno::OPNOTSUPP) => Ok(file),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn output_path(&self) -> PathBuf {
        self.0.join("control.out")
    }

    /// What the control daemon and its server have said last.
    pub(super) fn said(&self) -> String {
        let said = Output::open(self, true).and_then(|output| {
            let length = output.file.metadata()?.len();
            read(&output.file, length.saturating_sub(MAX_LOG))
        });
        String::from_utf8_lossy(&said.unwrap_or_default()).into_owned()
    }

    /// Removes what one that was killed left, which would keep the next from starting.
    pub(super) fn clear_pipe(&self) {
        if let Ok(pipe) = openat(CWD, self.pipe(), DIRECTORY, Mode::empty()) {
            empty(pipe, 0, &mut MAX_REMOVED.clone());
        }
    }

    /// Removes it. What a user has made too large for that stays.
    pub(super) fn remove(&self) {
        let removed = openat(CWD, &self.0, DIRECTORY, Mode::empty()).and_then(|folder| {
            empty(folder, MAX_DEPTH, &mut MAX_REMOVED.clone());
            unlinkat(CWD, &self.0, AtFlags::REMOVEDIR)
        });
        match removed {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => tracing::warn!(%error, "{} stays", self.0.display()),
        }
    }

    /// The control daemon and its servers: this user's processes that write the output, which no other process has had from the daemon,
    /// and the driver's programs that have this folder in their environment, as far as that is known within [`examine::PATIENCE`].
    pub(super) fn servants(&self, uid: u32, examiner: &Examiner) -> Vec<ProcessFd> {
        // As the kernel names it.
        let Ok(output) = self.output_path().canonicalize() else {
            return Vec::new();
        };
        let pipe = self.pipe();
        let deadline = Instant::now() + examine::PATIENCE;
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let found = processes.filter_map(|process| {
            let pid = process.file_name().to_str()?.parse().ok()?;
            let process = ProcessId::of(pid).filter(|it| it.is_of(uid))?;
            let writes = |fd| {
                let link = fs::read_link(format!("/proc/{pid}/fd/{fd}"));
                link.is_ok_and(|link| link == output)
            };
            let watch = process.watch()?;
            let serves = || {
                let folder = || examiner.variable(process, &watch, MPS_VARIABLES[0], deadline);
                process.program().starts_with(PROGRAMS)
                    && matches!(folder(), Ok(Some(folder)) if Path::new(&folder) == pipe)
            };
            (writes(1) || writes(2) || serves()).then_some(watch)
        });
        found.collect()
    }

    /// Kills them.
    pub(super) fn end_servants(&self, uid: u32, examiner: &Examiner) {
        self.servants(uid, examiner)
            .iter()
            .for_each(ProcessFd::kill);
    }

    /// Whose it is.
    pub(super) fn user(&self) -> Option<u32> {
        Some(fs::symlink_metadata(self.pipe()).ok()?.uid())
    }

    /// Whether there is a control daemon that can be asked.
    pub(super) fn has_control(&self) -> bool {
        // Whatever it is: only processes of the user open it.
        fs::symlink_metadata(self.pipe().join("control")).is_ok()
    }
}

/// What a control daemon writes, as it comes.
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    inode: u64,
    /// What was read, and what of it was given back.
    read: u64,
    punched: u64,
}

impl Output {
    /// The present one, from its begin or end on.
    pub(super) fn open(folder: &Folder, from_begin: bool) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let file = open_regular(&folder.output_path(), &mut options, OFlags::NOFOLLOW)?;
        let found = file.metadata()?;
        Ok(Self {
            inode: found.ino(),
            read: if from_begin { 0 } else { found.len() },
            punched: 0,
            file,
        })
    }

    /// Whether another control daemon writes another one by now.
    pub(super) fn is_old(&self, folder: &Folder) -> bool {
        let now = fs::symlink_metadata(folder.output_path());
        !now.is_ok_and(|now| now.ino() == self.inode)
    }

    /// The next whole lines, if there are any.
    pub(super) fn next(&mut self) -> io::Result<String> {
        let mut new = read(&self.file, self.read)?;
        match new.iter().rposition(|byte| *byte == b'\n') {
            Some(end) => new.truncate(end + 1),
            // No line is so long.
            None if new.len() as u64 == MAX_LOG => {}
            None => new.clear(),
        }
        self.read += new.len() as u64;
        // The writer appends: it does not notice.
        let done = self.read.saturating_sub(MAX_LOG);
        if done - self.punched.min(done) > MAX_READ {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(&self.file, hole, self.punched, done - self.punched);
            self.punched = done;
        }
        Ok(String::from_utf8_lossy(&new).into_owned())
    }
}

fn read(file: &File, from: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MAX_LOG as usize];
    let length = file.read_at(&mut bytes, from)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Makes a folder that is not there.
fn make(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().mode(mode).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Removes what is in a folder, without following anything, as far as `depth` and `left` go.
fn empty(folder: OwnedFd, depth: u32, left: &mut u32) {
    let Ok(entries) = Dir::read_from(&folder) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if *left == 0 {
            return;
        }
        *left -= 1;
        match entry.file_type() {
            FileType::Directory if depth == 0 => {}
            FileType::Directory => {
                if let Ok(inner) = openat(folder.as_fd(), name, DIRECTORY, Mode::empty()) {
                    empty(inner, depth - 1, left);
                }
                let _ = unlinkat(&folder, name, AtFlags::REMOVEDIR);
            }
            _ => {
                let _ = unlinkat(&folder, name, AtFlags::empty());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::unix::fs::symlink,
        process::{Command, Stdio},
    };

    use super::*;
    use crate::receiver::Place;

    fn folder() -> (tempfile::TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let folder = Folder::make(&dir.path().join("group"), uid, uid).unwrap();
        (dir, folder)
    }

    #[test]
    fn nothing_that_lies_in_the_users_part_is_followed() {
        let (dir, folder) = folder();
        let victim = dir.path().join("victim");
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("file"), "kept").unwrap();
        symlink(victim.join("file"), folder.pipe().join("control")).unwrap();
        symlink(&victim, folder.pipe().join("other")).unwrap();
        fs::create_dir(folder.pipe().join("inner")).unwrap();
        folder.clear_pipe();
        let left: Vec<_> = fs::read_dir(folder.pipe()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        // Were it a link, it would not even be looked into.
        fs::remove_dir(folder.pipe().join("inner")).unwrap();
        fs::remove_dir(folder.pipe()).unwrap();
        symlink(&victim, folder.pipe()).unwrap();
        folder.clear_pipe();
        folder.remove();
        assert!(!folder.path().exists());
        assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "kept");
    }

    #[test]
    fn an_output_is_begun_anew_and_never_where_a_link_leads() {
        let (dir, folder) = folder();
        let other = dir.path().join("other");
        fs::write(&other, "secret\n").unwrap();
        let output = folder.path().join("control.out");
        symlink(&other, &output).unwrap();
        assert_eq!(folder.said(), "");
        folder
            .begin_output()
            .unwrap()
            .write_all(b"hello\n")
            .unwrap();
        assert_eq!(folder.said(), "hello\n");
        assert_eq!(fs::read_to_string(&other).unwrap(), "secret\n");
        fs::remove_file(&output).unwrap();
        let made = Command::new("mkfifo").arg(&output).status().unwrap();
        assert!(made.success());
        assert_eq!(folder.said(), "", "nobody waits for a writer");
    }

    #[test]
    fn output_that_is_begun_has_its_room() {
        let (_dir, folder) = folder();
        let output = folder.begin_output().unwrap().metadata().unwrap();
        assert_eq!(output.len(), 0);
        assert!(output.blocks() * 512 >= MAX_LOG, "{output:?}");
    }

    #[test]
    fn output_is_read_by_line_and_read_lines_take_no_room() {
        let (_dir, folder) = folder();
        let mut writer = folder.begin_output().unwrap();
        writer.write_all(b"old\n").unwrap();
        let mut late = Output::open(&folder, false).unwrap();
        let mut reader = Output::open(&folder, true).unwrap();
        writer.write_all(b"a whole line\nand a").unwrap();
        assert_eq!(reader.next().unwrap(), "old\na whole line\n");
        assert_eq!(late.next().unwrap(), "a whole line\n");
        assert_eq!(reader.next().unwrap(), "");
        writer.write_all(b" part\n").unwrap();
        assert_eq!(reader.next().unwrap(), "and a part\n");
        // Longer than any line, and than what is kept.
        let more = "x".repeat(1023) + "\n";
        for _ in 0..4 * 1024 {
            writer.write_all(more.as_bytes()).unwrap();
        }
        writer.write_all(b"last\n").unwrap();
        let mut read = 0;
        let last = loop {
            match reader.next().unwrap() {
                lines if lines.ends_with("last\n") => break lines,
                lines => {
                    assert!(!lines.is_empty());
                    read += lines.len();
                }
            }
        };
        assert_eq!(read + last.len(), 4 * 1024 * 1024 + 5);
        let file = fs::metadata(folder.path().join("control.out")).unwrap();
        assert!(file.blocks() * 512 < file.len() / 2, "{file:?}");
        assert!(folder.said().ends_with(&(more + "last\n")));
        assert!(!reader.is_old(&folder));
        let _next = folder.begin_output().unwrap();
        assert!(reader.is_old(&folder));
    }

    #[test]
    fn servants_are_known_by_what_they_write_to_or_serve() {
        let (_dir, folder) = folder();
        let uid = rustix::process::geteuid().as_raw();
        let examiner = &Examiner::new(Place::Threads);
        let sleep = |out: Stdio| {
            let mut command = Command::new("sleep");
            command.arg("100").stdout(out).spawn().unwrap()
        };
        let mut servant = sleep(folder.begin_output().unwrap().into());
        let mut other = sleep(Stdio::null());
        // A server that writes elsewhere, and one of another folder.
        let program = folder.log().join("nvidia-cuda-mps-server");
        gpumux_tests::program(&program, "#!/bin/sh\necho; read line\n");
        let server = |pipe: PathBuf| {
            let mut command = Command::new(&program);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.env(MPS_VARIABLES[0], pipe).spawn().unwrap();
            let mut said = [0];
            let out = child.stdout.as_mut().unwrap();
            io::Read::read_exact(out, &mut said).unwrap();
            child
        };
        let (mut own, mut foreign) = (server(folder.pipe()), server(folder.log()));
        assert_eq!(folder.servants(uid, examiner).len(), 2);
        assert_eq!(folder.servants(uid + 1, examiner).len(), 0);
        folder.end_servants(uid, examiner);
        servant.wait().unwrap();
        own.wait().unwrap();
        assert!(foreign.try_wait().unwrap().is_none());
        foreign.kill().unwrap();
        foreign.wait().unwrap();
        assert_eq!(folder.servants(uid, examiner).len(), 0);
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

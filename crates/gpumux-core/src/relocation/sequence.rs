//! The calls that move a tenant's processes: all of them, or none.

use std::fmt::Display;

/// The driver's calls, for processes by their place in a list.
pub trait Checkpoints {
    /// Why a call failed.
    type Error: Display;

    /// Has its calls of CUDA wait, and its work end.
    ///
    /// # Errors
    /// The driver's; then the process goes on.
    fn lock(&mut self, process: usize) -> Result<(), Self::Error>;

    /// Takes it off its devices.
    ///
    /// # Errors
    /// The driver's; then it is still locked.
    fn checkpoint(&mut self, process: usize) -> Result<(), Self::Error>;

    /// Puts it on its devices again, the two exchanged or not.
    ///
    /// # Errors
    /// The driver's; then it is still on none.
    fn restore(&mut self, process: usize, exchanged: bool) -> Result<(), Self::Error>;

    /// Lets it go on.
    ///
    /// # Errors
    /// The driver's; then it is still locked.
    fn unlock(&mut self, process: usize) -> Result<(), Self::Error>;
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All are on the other device.
    Moved,
    /// All are where they were: why.
    Back(String),
    /// Some are not as they should be, since the way back failed too: why.
    Stuck(String),
}

/// Moves so many processes to the other device. If a call fails, those that were moved are moved back.
pub fn carry_out(calls: &mut impl Checkpoints, processes: usize) -> Outcome {
    let mut locked = 0;
    let mut failed = None;
    for process in 0..processes {
        match calls.lock(process) {
            Ok(()) => locked += 1,
            Err(error) => {
                failed = Some(format!(
                    "the driver does not lock it, as where its work does not end: {error}"
                ));
                break;
            }
        }
    }
    let mut stuck = None;
    if failed.is_none() {
        failed = exchange(calls, processes, &mut stuck);
    }
    for process in 0..locked {
        // Once more: a process that stays locked waits for good.
        let unlocked = calls.unlock(process).or_else(|_| calls.unlock(process));
        if let Err(error) = unlocked {
            stuck = Some(format!("a process cannot be unlocked: {error}"));
        }
    }
    match (stuck, failed) {
        (Some(why), _) => Outcome::Stuck(why),
        (None, Some(why)) => Outcome::Back(why),
        (None, None) => Outcome::Moved,
    }
}

/// Exchanges the devices of locked processes. Why that was undone, if it was; `stuck`: why it could not be.
fn exchange(
    calls: &mut impl Checkpoints,
    processes: usize,
    stuck: &mut Option<String>,
) -> Option<String> {
    let mut taken = 0;
    let mut failed = None;
    for process in 0..processes {
        match calls.checkpoint(process) {
            Ok(()) => taken += 1,
            Err(error) => {
                failed = Some(format!(
                    "the driver does not take it off its GPU, as where memory is managed or shared with other processes: {error}"
                ));
                break;
            }
        }
    }
    let mut put = 0;
    if failed.is_none() {
        for process in 0..processes {
            match calls.restore(process, true) {
                Ok(()) => put += 1,
                Err(error) => {
                    failed = Some(format!(
                        "the driver does not put it on the other GPU: {error}"
                    ));
                    break;
                }
            }
        }
    }
    failed.as_ref()?;
    for process in 0..taken {
        // The same exchange again brings one back that was moved.
        let back = match process < put {
            true => calls
                .checkpoint(process)
                .and_then(|()| calls.restore(process, true)),
            false => calls.restore(process, false),
        };
        let back = back.or_else(|_| calls.restore(process, process < put));
        if let Err(error) = back {
            *stuck = Some(format!("a process cannot be moved back: {error}"));
        }
    }
    failed
}

//! Several tasks in one process, a thread and a stream for each, that take orders: the shape of GPreempt's programs.
//!
//! The process prints `{"ready":true}` and then answers every line on its standard input with one line:
//!
//! ```text
//! {"start":12.5,"stop":14.5,"tasks":{"rt":{"arrivals":[0.1,0.2],"prepare_us":200,"hint":true}}}
//! {"tasks":{"rt":{"latencies_ms":[0.8,0.7],"begins_s":[0.1,0.2],"seconds":2.0}}}
//! ```
//!
//! `start` and `stop` are CLOCK_MONOTONIC seconds, arrivals are relative to `start`. A latency runs from the end of the
//! preparation, or from where it would have ended if the request before was still going on at the arrival.
//!
//! With two contexts, tasks of high priority are streams of the first and all others of the second. A hint is then what
//! GPreempt does: a kernel of one thread in the first context takes the device while the request is prepared. With
//! one context a hint goes to the preloaded library, if there is one.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, Write as _},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use gpumux_cuda::{Context, Device};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::{
    Task, Tasks, hints,
    kernels::{Gpu, Shape},
    loops::us_per_iteration,
};

/// How long a hint's kernel keeps the device after the preparation, in µs: until the request's first kernel is there.
const HOLD_SLACK_US: f64 = 100.0;

/// One line of orders.
#[derive(Clone, Debug, Deserialize)]
struct Order {
    start: f64,
    stop: f64,
    tasks: BTreeMap<String, Requests>,
}

/// What one task is to do.
#[derive(Clone, Debug, Deserialize)]
struct Requests {
    arrivals: Vec<f64>,
    #[serde(default)]
    prepare_us: f64,
    #[serde(default)]
    hint: bool,
}

/// What it did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Answer {
    latencies_ms: Vec<f64>,
    begins_s: Vec<f64>,
    seconds: f64,
}

/// A time and the work of a request, as far as the loop of a task needs them.
trait World {
    /// Seconds of CLOCK_MONOTONIC.
    fn now(&self) -> f64;
    /// Waits until then.
    fn sleep_until(&self, when: f64);
    /// Says that work comes in so many seconds.
    fn hint(&self, ahead: f64) -> anyhow::Result<()>;
    /// Serves one request.
    fn request(&self) -> anyhow::Result<()>;
}

/// Requests at their times between `start` and `stop`.
fn serve(world: &impl World, order: &Requests, start: f64, stop: f64) -> anyhow::Result<Answer> {
    let prepare = order.prepare_us / 1e6;
    let mut answer = Answer {
        seconds: stop - start,
        ..Answer::default()
    };
    for arrival in &order.arrivals {
        let due = start + arrival;
        let late = world.now() > due;
        world.sleep_until(due);
        if world.now() >= stop {
            break;
        }
        let ready = world.now() + prepare;
        if order.hint {
            world.hint(prepare)?;
        }
        while world.now() < ready {
            std::hint::spin_loop();
        }
        let from = if late { due + prepare } else { world.now() };
        world.request()?;
        answer.latencies_ms.push((world.now() - from) * 1e3);
        answer.begins_s.push(from - start);
    }
    world.sleep_until(stop);
    Ok(answer)
}

/// A task on a device.
struct OnDevice {
    gpu: Gpu,
    task: Task,
    iterations: u32,
    hint: Hint,
}

/// How a task says that its work comes.
enum Hint {
    /// It cannot.
    None,
    /// By the preloaded library.
    Library(i32),
    /// By a kernel on a stream of its own.
    Kernel(Box<Gpu>),
}

const ONE: Shape = Shape {
    blocks: 1,
    threads: 1,
};

impl World for OnDevice {
    fn now(&self) -> f64 {
        now()
    }

    fn sleep_until(&self, when: f64) {
        while let left @ 0.0.. = when - now() {
            thread::sleep(Duration::from_secs_f64(left));
        }
    }

    fn hint(&self, ahead: f64) -> anyhow::Result<()> {
        match &self.hint {
            Hint::None => {}
            Hint::Library(device) => hints::say(*device, ahead),
            Hint::Kernel(hold) => hold.spin(ONE, ((ahead * 1e6 + HOLD_SLACK_US) * 1e3) as u64)?,
        }
        Ok(())
    }

    fn request(&self) -> anyhow::Result<()> {
        let shape = self.gpu.shape(1, 256);
        for _ in 0..self.task.kernels {
            self.gpu.work(shape, self.iterations)?;
        }
        Ok(self.gpu.stream.synchronize()?)
    }
}

fn now() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// A thread's orders and where its answers go.
type Post = (
    Receiver<(Requests, f64, f64)>,
    Sender<Result<Answer, String>>,
);

/// Makes a task ready in its context, says so, and serves until no orders come.
fn live(
    context: &Context,
    args: &Tasks,
    task: Task,
    us_per_iteration: f64,
    (orders, answers): Post,
) {
    let open = || -> anyhow::Result<OnDevice> {
        context.make_current()?;
        let gpu = Gpu::on(context)?;
        let hint = match (task.high, args.two_contexts) {
            (false, _) => Hint::None,
            (true, true) => Hint::Kernel(Box::new(Gpu::on(context)?)),
            (true, false) => Hint::Library(args.device as i32),
        };
        let iterations = ((task.kernel_us / us_per_iteration).round() as u32).max(1);
        let ready = OnDevice {
            gpu,
            task: task.clone(),
            iterations,
            hint,
        };
        ready.request()?;
        Ok(ready)
    };
    let ready = match open() {
        Ok(ready) => ready,
        Err(error) => {
            let _ = answers.send(Err(format!("{}: {error:#}", task.name)));
            return;
        }
    };
    if answers.send(Ok(Answer::default())).is_err() {
        return;
    }
    for (requests, start, stop) in orders {
        let answer = serve(&ready, &requests, start, stop);
        if answers
            .send(answer.map_err(|error| format!("{}: {error:#}", task.name)))
            .is_err()
        {
            return;
        }
    }
}

/// Serves orders until the standard input ends.
pub(crate) fn tasks(args: &Tasks) -> anyhow::Result<()> {
    let device = Device::get(args.device).with_context(|| format!("device {}", args.device))?;
    // The first context of the process is that of the latency-critical tasks.
    let first = Context::primary(device).context("cannot create a context")?;
    let us_per_iteration = match args.us_per_iteration {
        Some(us) => us,
        None => us_per_iteration(&Gpu::on(&first)?)?,
    };
    let second = if args.two_contexts {
        Context::create(device)?
    } else {
        first.clone()
    };
    thread::scope(|scope| {
        let mut posts = BTreeMap::new();
        for task in &args.tasks {
            let context = if task.high { &first } else { &second };
            let (orders, theirs) = channel();
            let (answers, mine) = channel();
            if posts.insert(task.name.clone(), (orders, mine)).is_some() {
                bail!("two tasks are called {}", task.name);
            }
            scope.spawn(move || {
                live(
                    context,
                    args,
                    task.clone(),
                    us_per_iteration,
                    (theirs, answers),
                )
            });
        }
        for (name, (_, answers)) in &posts {
            if let Err(error) = answers.recv().with_context(|| format!("{name} ended"))? {
                bail!(error);
            }
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::json!({"ready": true}))?;
        out.flush()?;
        for line in std::io::stdin().lock().lines() {
            let order: Order = serde_json::from_str(&line?).context("an order")?;
            let mut told = Vec::new();
            for (name, requests) in order.tasks {
                let (orders, answers) = posts
                    .get(&name)
                    .with_context(|| format!("no task is called {name}"))?;
                orders
                    .send((requests, order.start, order.stop))
                    .with_context(|| format!("{name} ended"))?;
                told.push((name, answers));
            }
            let mut found = BTreeMap::new();
            for (name, answers) in told {
                match answers.recv().with_context(|| format!("{name} ended"))? {
                    Ok(answer) => found.insert(name, answer),
                    Err(error) => bail!(error),
                };
            }
            writeln!(out, "{}", serde_json::json!({"tasks": found}))?;
            out.flush()?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// A clock that only work and waiting move.
    #[derive(Default)]
    struct Fake {
        now: Cell<f64>,
        takes: Vec<f64>,
        served: Cell<usize>,
        hints: RefCell<Vec<(f64, f64)>>,
    }

    impl World for Fake {
        fn now(&self) -> f64 {
            // Looking takes a microsecond, so that a preparation ends.
            self.now.set(self.now.get() + 1e-6);
            self.now.get()
        }

        fn sleep_until(&self, when: f64) {
            self.now.set(self.now.get().max(when));
        }

        fn hint(&self, ahead: f64) -> anyhow::Result<()> {
            self.hints.borrow_mut().push((self.now.get(), ahead));
            Ok(())
        }

        fn request(&self) -> anyhow::Result<()> {
            let served = self.served.replace(self.served.get() + 1);
            self.now
                .set(self.now.get() + self.takes[served % self.takes.len()]);
            Ok(())
        }
    }

    fn order(arrivals: &[f64], hint: bool) -> Requests {
        Requests {
            arrivals: arrivals.to_vec(),
            prepare_us: 200.0,
            hint,
        }
    }

    #[test]
    fn late_request_counts_its_wait() {
        let world = Fake {
            takes: vec![0.015, 0.001],
            ..Fake::default()
        };
        let answer = serve(&world, &order(&[0.0, 0.01, 0.03], false), 100.0, 100.05).unwrap();
        let ms: Vec<_> = answer.latencies_ms.iter().map(|it| it.round()).collect();
        // The second one comes at 10 ms and waits until 15.2 for the first.
        assert_eq!(ms, [15.0, 6.0, 15.0]);
        assert_eq!(answer.seconds, 100.05 - 100.0);
        assert!(world.now.get() >= 100.05, "it waits for the end");
    }

    #[test]
    fn requests_after_the_end_are_not_made() {
        let world = Fake {
            takes: vec![0.001],
            ..Fake::default()
        };
        let answer = serve(&world, &order(&[0.01, 0.02, 0.07], false), 10.0, 10.05).unwrap();
        assert_eq!(answer.latencies_ms.len(), 2);
    }

    #[test]
    fn hint_comes_when_the_preparation_begins() {
        let world = Fake {
            takes: vec![0.001],
            ..Fake::default()
        };
        let answer = serve(&world, &order(&[0.01], true), 10.0, 10.05).unwrap();
        let hints = world.hints.borrow();
        let [(at, ahead)] = hints[..] else {
            panic!("{hints:?}")
        };
        assert!((at - 10.01).abs() < 1e-4 && (ahead - 200e-6).abs() < 1e-9);
        assert!((answer.begins_s[0] - 0.0102).abs() < 1e-4);
    }

    #[test]
    fn task_is_read_or_refused() {
        let task: Task = "vgg_rt=20x30.5=high".parse().unwrap();
        assert_eq!(
            task,
            Task {
                name: "vgg_rt".into(),
                kernels: 20,
                kernel_us: 30.5,
                high: true
            }
        );
        for wrong in [
            "x",
            "x=1x1",
            "x=0x1=low",
            "x=1x0=low",
            "x=1x1=middle",
            "x=1=low",
            "x=1x1=low=2",
        ] {
            assert!(wrong.parse::<Task>().is_err(), "{wrong}");
        }
    }
}
